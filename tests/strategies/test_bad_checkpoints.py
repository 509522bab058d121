"""Checkpoints that are torn, of another model or origin, or in the way: a sentence with the fix each."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_builders import a_trainer
from torch import nn

from results.checkpoint import Checkpoint, LaidOut
from results.errors import NewerSchemaError, SchemaError, StoreError, UsageError
from strategies import CheckpointWarning, Trainer
from strategies.saving.run_folder import RunFolder, best_of, sum_of


def opened(*, width: int = 4, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    return a_trainer(module, **settings)


def trained(trainer: Trainer, steps: int = 1) -> Trainer:
    for _ in range(steps):
        trainer.step(iter([(torch.ones(5, 3), torch.zeros(5, 2))]))
    return trainer


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder with checkpoints of the steps 1 and 2."""
    trainer = opened()
    for _ in range(2):
        trained(trainer).save(tmp_path / "run")
    return tmp_path / "run"


def steps_of(run: Path) -> list[int]:
    return [kept.manifest.step for kept in RunFolder(run).kept()]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest, changed."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    change(manifest)
    (path / "checkpoint.json").write_text(json.dumps(manifest))


def newest(run: Path) -> Path:
    return run / "step-000000002"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


TEARS: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: flip(path / "__0_0.distcp"),
    "half of a file": lambda path: os.truncate(path / "__0_0.distcp", 100),
    "a lost file": lambda path: (path / "__0_0.distcp").unlink(),
    "a flipped bit in the list": lambda path: flip(path / ".metadata"),
    "half of a manifest": lambda path: os.truncate(path / "checkpoint.json", 100),
    "no manifest": lambda path: (path / "checkpoint.json").unlink(),
}


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_checkpoint_is_named_and_the_one_before_it_is_taken(run, tear) -> None:
    TEARS[tear](newest(run))
    trainer = opened()
    with pytest.warns(CheckpointWarning, match="step-000000002 is not complete") as told:
        resumed = trainer.resume(run)
    assert told[0].filename == __file__
    assert (resumed.step, trainer.steps) == (1, 1)
    with pytest.raises(StoreError):
        trainer.resume(run, step=2)
    # The torn one is put aside once, by the next save; what comes in its place stays.
    for _ in range(2):
        assert trained(trainer).save(run).wait() is not None
    assert steps_of(run) == [1, 2, 3]
    assert len(list(run.glob("torn-step-000000002.*"))) == 1


def test_a_folder_without_any_whole_checkpoint_says_so(run) -> None:
    for path in run.glob("step-*"):
        (path / ".metadata").unlink()
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(StoreError, match="has no intact checkpoint: put a copy back"),
    ):
        opened().resume(run)


def test_nothing_to_resume_is_none(tmp_path) -> None:
    assert opened().resume(tmp_path / "run") is None
    with pytest.raises(StoreError, match=r"no checkpoint of step 7.*none"):
        opened().resume(tmp_path / "run", step=7)


def test_a_newer_checkpoint_is_refused_and_not_passed_over(run) -> None:
    rewrite(newest(run), lambda manifest: manifest.update(schema_version=99))
    with pytest.raises(NewerSchemaError):
        opened().resume(run)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"width": 5},
            r"belongs to another model: this one has 0\.weight \[5, 3\], "
            r"and the checkpoint has it with the shape",
        ),
        ({"optimizer": "adamw"}, "was trained by SGD, and this trainer has AdamW: use the same optimizer"),
    ],
)
def test_another_model_or_optimizer_is_refused(run, other, message) -> None:
    trainer = opened(**other)
    before = trainer.full_state_dict()
    with pytest.raises(UsageError, match=message):
        trainer.resume(run)
    torch.testing.assert_close(trainer.full_state_dict(), before, rtol=0, atol=0)


def test_a_layer_that_this_model_lacks_is_named(run) -> None:
    trainer = a_trainer(nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(UsageError, match=r"it has 1\.bias|it has 1\.weight"):
        trainer.resume(run)


def test_conditions_that_differ_are_told_and_training_goes_on(run) -> None:
    rewrite(newest(run), lambda manifest: manifest["conditions"].update(torch="2.11.0"))
    with pytest.warns(
        CheckpointWarning, match=r"torch was 2\.11\.0, and is .*: what follows need not be bit for bit"
    ):
        resumed = opened().resume(run)
    assert resumed.exact


def test_settings_that_differ_are_told(run) -> None:
    with pytest.warns(CheckpointWarning) as told:
        resumed = opened(accumulation=2, precision="bf16", optimizer="sgd:lr=0.5").resume(run)
    assert all(each.filename == __file__ for each in told)
    assert set(resumed.notes) == {
        "optimizer was sgd, and is sgd:lr=0.5: the rates and options of the checkpoint are put back",
        "precision was fp32, and is bf16: what follows need not be bit for bit",
        "accumulation was 1, and is 2: what follows need not be bit for bit",
    }


class Evil:
    """Would make a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def planted(run: Path, where: str, evil: Evil) -> None:
    """Code in a checkpoint whose checksums are right, as whoever sends it would make them."""
    path = newest(run)
    if where == "list":
        (path / ".metadata").write_bytes(pickle.dumps(evil))
    else:
        data = (path / "__0_0.distcp").read_bytes()
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for index, info in metadata.storage_data.items():
            if index.fqn.startswith("own/" if where == "blob" else "parameters/"):
                info.offset, torn = len(data), path / "evil"
                torch.save({"own": evil}, torn)
                info.length = torn.stat().st_size
                data += torn.read_bytes()
                torn.unlink()
        (path / "__0_0.distcp").write_bytes(data)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sums = {name: sum_of(path / name) for name in ("__0_0.distcp", ".metadata")}
    files = {name: {"bytes": each.bytes, "sha256": each.sha256} for name, each in sums.items()}
    rewrite(path, lambda manifest: manifest.update(files=files))


@pytest.mark.parametrize("where", ["list", "blob", "tensor"])
def test_code_in_a_checkpoint_is_not_run(run, tmp_path, where) -> None:
    planted(run, where, Evil(tmp_path / "made"))
    trainer = opened()
    with pytest.raises(SchemaError, match="no code in it was run"):
        trainer.resume(run)
    assert not (tmp_path / "made").exists()
    assert trainer.steps == 0


def test_two_runs_in_one_folder_are_told_apart(run) -> None:
    fresh = trained(opened(), 3)
    with pytest.raises(UsageError, match=r"neither wrote nor .*: resume"):
        fresh.save(run)
    one, two = opened(), opened()
    for trainer in (one, two):
        trainer.resume(run)
    assert trained(one).save(run).wait() is not None
    with pytest.raises(UsageError, match="checkpoint of step 3 that this run neither wrote"):
        trained(two, 2).save(run)
    assert steps_of(run) == [1, 2, 3]


def test_a_step_that_is_saved_twice_is_written_once(run) -> None:
    trainer = opened()
    trainer.resume(run)
    trained(trainer)
    first = trainer.save(run).wait()
    assert first is not None
    written = (first / "checkpoint.json").stat().st_mtime_ns
    assert trainer.save(run).wait() == first
    assert (first / "checkpoint.json").stat().st_mtime_ns == written


@pytest.mark.parametrize("back", ["resume", "load_state_dict"])
def test_a_trainer_that_goes_back_leaves_what_came_later(tmp_path, back) -> None:
    trainer = opened()
    for metric in (1.0, 2.0, 3.0):
        trained(trainer).save(tmp_path, metric=metric)
    if back == "resume":
        trainer.resume(tmp_path, step="best")
    else:
        trainer.load_state_dict(trained(opened()).state_dict())
    for _ in range(2):
        # Neither beside those that came later, nor as the one of this step that was written before.
        with pytest.raises(UsageError, match="has a checkpoint of step 3 that this run neither wrote"):
            trained(trainer).save(tmp_path, keep=2)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_state_of_memory_goes_on_after_the_checkpoints_before_it(run) -> None:
    trainer = opened()
    trainer.resume(run)
    state = trainer.state_dict()
    trained(trainer, 2).load_state_dict(state)
    assert trained(trainer).save(run).wait() is not None
    assert steps_of(run) == [1, 2, 3]


def test_a_run_that_was_over_is_started_again_and_has_nothing_to_save(run, tmp_path) -> None:
    again = opened()
    again.resume(run)
    assert again.save(run).wait() == newest(run)
    with pytest.warns(CheckpointWarning, match=r"with the metric None: 1\.5 is not recorded") as told:
        assert again.save(run, metric=1.5).wait() == newest(run)
    assert told[0].filename == __file__
    other = trained(opened(), 2)
    other.save(tmp_path / "other")
    # Of this step, but another run's.
    with pytest.raises(UsageError, match="neither wrote nor"):
        again.save(tmp_path / "other")


def test_the_last_ones_and_the_best_are_kept(tmp_path) -> None:
    trainer = opened()
    for metric in (5.0, 1.0, 3.0, float("nan"), 4.0):
        trained(trainer).save(tmp_path, keep=2, metric=metric)
    assert steps_of(tmp_path) == [2, 4, 5]
    resumed = opened().resume(tmp_path, step="best")
    assert resumed.step == 2
    with pytest.raises(UsageError, match="keep is at least 1"):
        trainer.save(tmp_path, keep=0)


def test_the_next_save_removes_the_leftovers_of_a_killed_one(run) -> None:
    trainer = opened()
    trainer.resume(run)
    left = run / ".step-000000003.abc.tmp"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    trained(trainer).save(run)
    assert not left.exists()
    assert steps_of(run) == [1, 2, 3]


SPOILED: dict[str, Callable[[Trainer], torch.Tensor]] = {
    "0.weight": lambda trainer: trainer.model.bare[0].weight,
    "momentum_buffer of 2.bias": lambda trainer: trainer.optimizer.state[trainer.model.bare[2].bias][
        "momentum_buffer"
    ],
    "buffer 1.running_var": lambda trainer: trainer.model.bare[1].running_var,
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_non_finite_state_is_not_saved_and_the_last_checkpoint_stays(tmp_path, name) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[1].register_buffer("mask", torch.tensor([-float("inf"), 0]))
    trainer = trained(a_trainer(module))
    assert trainer.save(tmp_path).wait() is not None
    trained(trainer)
    with torch.no_grad():
        SPOILED[name](trainer).fill_(float("nan"))
    sentence = rf"{re.escape(name)} is not finite after step 2: the last checkpoint stays"
    with pytest.warns(CheckpointWarning, match=sentence) as told:
        assert trainer.save(tmp_path, keep=1).wait() is None
    assert told[0].filename == __file__
    assert steps_of(tmp_path) == [1]


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """The system refuses to write more to any file, as to a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_told_and_training_goes_on(run, asynchronous) -> None:
    trainer = opened()
    trainer.resume(run)
    trained(trainer)
    with small_files(1000), pytest.warns(CheckpointWarning, match="GiB are free there: free some space"):
        assert trainer.save(run, keep=1, asynchronous=asynchronous).wait() is None
    assert steps_of(run) == [1, 2]
    assert not list(run.glob(".*"))
    trained(trainer)
    assert trainer.save(run, keep=1).wait() is not None
    assert steps_of(run) == [4]


def full_on_one(rank: int, run: Path) -> tuple[bool, list[int], str]:
    """On two ranks of which one cannot write: what a save gives, and what an export says."""
    torch.manual_seed(0)
    trainer = a_trainer(nn.Linear(300, 20), strategy="scratch-fsdp")
    trainer.step(iter([(torch.ones(4, 300), torch.zeros(4, 20))]))
    trainer.save(run)
    trainer.step(iter([(torch.ones(4, 300), torch.zeros(4, 20))]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with small_files(1000 if rank == 1 else 2**30):
            failed = trainer.save(run).wait() is None
    trainer.step(iter([(torch.ones(4, 300), torch.zeros(4, 20))]))
    exported = ""
    with small_files(1000 if rank == 0 else 2**30):
        try:
            trainer.export(run / "model.pt")
        except StoreError as error:
            exported = str(error)
    trainer.step(iter([(torch.ones(4, 300), torch.zeros(4, 20))]))
    return failed, steps_of(run), exported


def test_a_disk_that_is_full_for_one_rank_is_known_to_all(ranks, tmp_path) -> None:
    (*first, exported), second = ranks(2, full_on_one, tmp_path)
    assert first == [True, [1]]
    assert second == (*first, exported)
    assert "cannot write" in exported
    assert "choose another path or free space" in exported
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def on_folders_of_their_own(rank: int, folder: Path) -> tuple[bool, list[str], list[Path]]:
    """On a rank whose folder has the path of the others' and is another, as on nodes that share none."""
    own, before = folder / f"node{rank}", Path.cwd()
    own.mkdir()
    os.chdir(own)
    try:
        torch.manual_seed(0)
        trainer = a_trainer(nn.Linear(30, 20), strategy="scratch-fsdp")
        trainer.step(iter([(torch.ones(4, 30), torch.zeros(4, 20))]))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            failed = trainer.save("run").wait() is None
        return failed, [str(each.message) for each in told], list((own / "run").iterdir())
    finally:
        os.chdir(before)


def test_ranks_that_do_not_share_the_folder_are_told(ranks, tmp_path) -> None:
    for failed, told, left in ranks(2, on_folders_of_their_own, tmp_path):
        assert failed
        assert len(told) == 1
        assert f"all ranks must reach {tmp_path}/node0/run on one shared file system" in told[0]
        assert "free some space" not in told[0]
        assert left == []


class Position:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


def test_attaching_an_unfit_object_is_refused_with_the_reason() -> None:
    trainer, schedules = opened(), torch.optim.lr_scheduler
    with pytest.raises(UsageError, match=r"data \(list\) has no state_dict"):
        trainer.attach(data=[])
    with pytest.raises(UsageError, match=r"belongs to another optimizer: make it with trainer\.optimizer"):
        trainer.attach(schedule=schedules.StepLR(opened().optimizer, 2))
    with pytest.raises(UsageError, match=r"schedule \(CosineAnnealingLR\) has no steps \(T_max=0\)"):
        trainer.attach(schedule=schedules.CosineAnnealingLR(trainer.optimizer, 0))


def test_objects_that_are_not_attached_again_are_named(tmp_path) -> None:
    trainer = trained(opened())
    trainer.attach(data=Position(5), rates=Position(1))
    trainer.save(tmp_path)
    other = opened()
    other.attach(rates=Position(0), position=Position(0))
    with pytest.warns(CheckpointWarning):
        resumed = other.resume(tmp_path)
    assert set(resumed.notes) == {
        "it has the state of 'data', which is not attached",
        "it has no state of 'position': that starts anew",
    }
    assert other.attached["rates"].state_dict() == 1


def test_a_state_that_would_run_code_is_not_saved(tmp_path) -> None:
    trainer = opened()
    trainer.attach(data=Position({"made": Evil(tmp_path / "made")}))
    with pytest.raises(UsageError, match="the state of 'data' cannot be saved, as loading it would run code"):
        trainer.save(tmp_path / "run")


def test_a_state_of_another_layout_is_refused() -> None:
    trainer = opened()
    state = trainer.state_dict()
    with pytest.raises(UsageError, match="for the same rank of"):
        trainer.load_state_dict({**state, "laid_out": ["ddp", "none", "default", 2, None, 0]})
    with pytest.raises(UsageError, match="belongs to another model"):
        opened(width=5).load_state_dict(state)
    other = opened(optimizer="adamw")
    with pytest.raises(UsageError, match="was trained by SGD, and this trainer has AdamW"):
        other.load_state_dict(state)
    more = opened()
    more.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.5})
    before = more.full_state_dict()
    with pytest.raises(UsageError, match="1 groups of parameters and this one 2: build the same groups"):
        more.load_state_dict(trained(trainer).state_dict())
    torch.testing.assert_close(more.full_state_dict(), before, rtol=0, atol=0)
    assert more.steps == 0


def test_a_trainer_that_has_trained_goes_on_from_its_own_layout_alone(run) -> None:
    rewrite(newest(run), lambda manifest: manifest["laid_out"].update(strategy="ddp", ranks=1))
    with pytest.warns(CheckpointWarning, match="ddp on 1 ranks .* as single"):
        opened().resume(run)
    trainer = trained(opened())
    with pytest.raises(UsageError, match="make a new one, and resume it"):
        trainer.resume(run)
    assert trainer.steps == 1


def test_a_step_that_is_none_is_refused(run) -> None:
    with pytest.raises(UsageError, match="step is a number, 'best' or None"):
        opened().resume(run, step="last")


# The folder of a run's checkpoints: which of them go.


def _write(run: RunFolder, step: int, metric: float | None, name: str | None) -> None:
    manifest = Checkpoint(
        step=step,
        session="s",
        laid_out=LaidOut(strategy="ddp", compression="none", collective="default", ranks=2),
        optimizer="SGD",
        own_replicas=False,
        conditions={},
        files={},
        metric=metric,
        metric_name=name,
    )
    run.finish(run.begin(step, "s", {(step - 1, "s")}), manifest)


@pytest.mark.parametrize(
    ("written", "stay"),
    [
        ([(0.3, None), (0.2, None), (0.4, None), (0.5, None)], [2, 4]),
        # A negated accuracy is less than any loss: the best of the metric that is asked for now stays.
        ([(-0.9, "val_accuracy"), (0.3, "val_loss"), (0.4, "val_loss"), (0.5, "val_loss")], [2, 4]),
        ([(-0.9, "val_accuracy"), (-0.8, "val_accuracy"), (None, None), (None, None)], [1, 4]),
    ],
)
def test_the_last_and_the_best_by_the_metric_of_the_newest_stay(written, stay, tmp_path) -> None:
    run = RunFolder(tmp_path)
    for step, (metric, name) in enumerate(written, start=1):
        _write(run, step, metric, name)
    run.forget(1)
    assert [kept.manifest.step for kept in run.kept()] == stay
    best = best_of(run.kept())
    assert best.manifest.step == stay[0]
