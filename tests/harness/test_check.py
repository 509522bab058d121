"""`bench check` reports how a workload behaves before anything is planned with it; the check of a dry run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from harness.launch.check import check, check_request, count_own_parts
from results.errors import MachineError
from results.parts import Unknown
from workloads.catalog import WORKLOADS, facts

TYPO = """
import os

from torch import nn, randn
from workloads import Workload


def build():
    def synthetic(generator, samples):
        return {"image": randn(samples, 4, generator=generator), "label": randn(samples, 1)}

    return Workload(module=nn.Linear(4, 1), loss=nn.functional.mse_loss, synthetic=synthetic)


def step():
    def step(model, batch):
        return model(batch["imgae"])

    return Workload(module=nn.Linear(4, 1), step=step, synthetic=build().synthetic)


def only_data():
    samples = [(randn(4), randn(1)) for _ in range(16)]
    return Workload(module=nn.Linear(4, 1), loss=nn.functional.mse_loss, data=samples)
"""


@pytest.mark.slow
def test_a_workload_is_built_trained_and_proven_and_every_strategy_asked(bench, tmp_path) -> None:
    shutil.copy(Path(__file__).parents[1] / "worker/proof_models.py", tmp_path)
    done = bench("check", "py:proof_models:cancelling_by_a_step", "--batch-size", "4")
    assert done.returncode == 0, done.stderr
    # 6 * 8 + 8, 8 * 3 + 3, and twice 4 (8 * 8 + 8) of attention, 8 * 16 + 16, 2 * 16, 16 * 8 + 8.
    assert "module    Cancelling, 1,283 parameters" in done.stdout
    assert "blocks    2: blocks.0 to blocks.1" in done.stdout
    assert "[0] float32 (4, 4, 6)" in done.stdout
    assert "FLOP, forward and backward" in done.stdout
    said = {line.split()[0]: line for line in done.stdout.partition("\nstrategy")[2].splitlines()[1:]}
    assert "proven" in said["ddp"]
    assert "equal bit for bit" in said["ddp"]
    for strategy in ("scratch-ddp", "fsdp", "zero1", "scratch-fsdp", "tp"):
        assert re.search("proven +[0-9]|runs.*not proven", said[strategy]), said[strategy]
    assert "it takes batches of two tensors, (inputs, targets)" in said["pipeline:gpipe"]
    assert "auto" not in said


@pytest.mark.slow
def test_an_error_is_in_the_words_of_the_contract_and_names_the_line(bench, tmp_path) -> None:
    (tmp_path / "typo.py").write_text(TYPO)
    done = bench("check", "py:typo:step", "--strategy", "ddp")
    assert done.returncode == 1
    assert "py:typo:step: KeyError: 'imgae' (typo.py, line 17)" in done.stderr
    assert "['image'] float32 (8, 4)" in done.stdout
    call = ("matrix", "--workload", "py:typo:build", "--gpus", "1", "--device", "cpu", "--dry-run")
    dry = bench(*call)
    assert dry.returncode == 2
    assert "py:typo:build does not train: the batch is a mapping with 'image', 'label'" in dry.stderr
    assert "for others use a step(model, batch)" in dry.stderr
    assert "py-typo-build" in dry.stdout


@pytest.mark.slow
def test_a_dry_run_checks_the_samples_that_the_call_would_train_on(bench, tmp_path) -> None:
    (tmp_path / "typo.py").write_text(TYPO)
    call = ("matrix", "--workload", "py:typo:only_data", "--gpus", "1", "--device", "cpu", "--dry-run")
    dry = bench(*call, "--batch-size", "4")
    assert dry.returncode == 2
    assert "does not train" in dry.stderr
    assert "--dataset own" in dry.stderr
    assert bench(*call, "--batch-size", "4", "--dataset", "own").returncode == 0


PARTS = """
import os

from torch import nn, randn
from workloads import Workload


def synthetic(generator, samples):
    return randn(samples, 4, generator=generator), randn(samples, 1, generator=generator)


class Trained(nn.Linear):
    def forward(self, x):
        assert x.is_meta, "planning trains it"
        return super().forward(x)


def build():
    return Workload(module=Trained(4, 1), loss=nn.functional.mse_loss, synthetic=synthetic)


class Reading(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum().item() > 0 else -x)


def reads():
    return Workload(module=Reading(4, 1), loss=nn.functional.mse_loss, synthetic=synthetic)


def dies():
    print("loading vocabulary", "half of it", sep=os.linesep, flush=True)
    os._exit(3)
"""


@pytest.mark.slow
def test_planning_counts_parts_without_training_and_says_why_they_are_unknown(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("workloads.catalog._COUNTED", {})
    (tmp_path / "parts.py").write_text(PARTS)
    known = {}
    for function in ("build", "reads", "dies"):
        workload = f"py:parts:{function}"
        count_own_parts(workload, tmp_path)
        known[function] = facts(WORKLOADS.parse(workload))
    assert (known["build"].parameters, known["build"].heads) == (5, ())
    assert "cannot be counted on the meta device: Tensor.item()" in str(known["reads"].parts)
    assert known["reads"].heads == ()
    assert "pipeline cuts a model between its blocks" in str(known["reads"].uncut)
    assert str(known["dies"].parts).endswith(
        "ended without a result: it ended with exit code 3; the last line printed: half of it"
    )
    # Whether layers of it can be split is unknown as well: nothing is refused.
    assert isinstance(known["dies"].heads, Unknown)


def test_a_check_that_took_too_long_says_so_beside_the_last_printed_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        "harness.launch.check._run", lambda folder, **given: (None, f"reading\nstep 1{'.' * 900}\n\n")
    )
    with pytest.raises(MachineError) as raised:
        check(check_request("mlp", micro_batch=None, folder=tmp_path))
    assert str(raised.value) == (
        "the check of mlp ended without a result: it took longer than 600 s; the last line printed: "
        f"step 1{'.' * 294}"
    )


def test_a_killed_check_leaves_neither_its_folder_nor_its_ranks(tmp_path) -> None:
    command = (sys.executable, "-m", "harness.cli", "check", "mlp")
    bench = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    end = time.monotonic() + 120

    def is_rank(child: psutil.Process) -> bool:
        # The command line of a child is that of bench until it is a rank.
        with suppress(psutil.NoSuchProcess):
            return "harness.worker.check" in child.cmdline()
        return False

    while sum(map(is_rank, psutil.Process(bench.pid).children())) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert list(tmp_path.glob("bench-check-*"))
    bench.kill()
    bench.wait()
    while any(tmp_path.glob("bench-check-*")):
        # It stays as long as a rank does.
        assert time.monotonic() < end
        time.sleep(0.01)


CHAIN = """
from torch import nn, randint, randn
from workloads import Workload


def build():
    def synthetic(generator, samples):
        return randn(samples, 6, generator=generator), randint(5, (samples,), generator=generator)

    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
    module = nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 5))
    return Workload(module=module, loss=nn.functional.cross_entropy, synthetic=synthetic)
"""


@pytest.mark.slow
def test_a_model_without_a_layout_is_weighed_by_auto_and_proven_as_a_pipeline(bench, tmp_path) -> None:
    (tmp_path / "chain.py").write_text(CHAIN)
    done = bench("check", "py:chain:build", "--strategy", "pipeline:gpipe")
    assert "proven" in done.stdout.partition("\nstrategy")[2], done.stdout
    call = ("matrix", "--workload", "py:chain:build", "--gpus", "2", "--device", "cpu")
    dry = bench(*call, "--strategy", "auto", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "auto for py:chain:build on 2: ddp, because it fits" in dry.stdout
    assert "pipeline:1f1b" in dry.stdout
