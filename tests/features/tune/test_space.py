"""The space of a tune: which settings it has, which are refused, and what its declarations say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from builders import plan_of
from click.testing import CliRunner

from harness.cli.matrix import matrix_command
from harness.features.tune import space as space_module
from harness.features.tune.call import Tune
from harness.features.tune.command import tune_command
from harness.features.tune.space import SEARCHED, Space, call_words, differing, make_space, nothing_fits
from harness.plan.request import make_requests
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import MIB, Devices, Limit
from results.errors import UsageError
from results.plan import Request
from results.store import Study
from strategies.catalog import STRATEGIES


def space_of(file: str | None = None, **options: Any) -> Space:
    """The space of a call on two ranks of this CPU."""
    given = {"workload": "mlp", "gpus": "2", "device": "cpu", "compile": "false"} | options
    path = None
    if file is not None:
        path = Path("space.yaml")
        path.write_text(file)
    return Tune(StudyFile(**given), space_file=path)._space


def values(space: Space, key: str) -> set[str]:
    return {one.setting.choices[key] for one in space.candidates if key in one.setting.choices}


def test_only_what_keeps_training_is_searched_unasked() -> None:
    assert [name for name, (learning, tuned) in SEARCHED.items() if learning == "changed" and tuned] == []
    for known in STRATEGIES.all_facts:
        for name, option in known.options.items():
            read = [option.read(text, name) for text in option.tuned]
            assert not read or read[0] == option.default, (known.name, name)
            for text in option.tuned:
                own = known.name + (f":{known.positional.example}" if known.positional else "")
                assert STRATEGIES.facts(f"{own}:{name}={text}").differences == (), (known.name, name)


def test_a_global_batch_is_kept_by_every_setting() -> None:
    space = space_of(global_batch_size="64")
    assert {one.cell.global_batch for one in space.candidates} == {64}
    assert {one.cell.micro_batch for one in space.candidates} >= {32, 16, 1}
    assert space_of(batch_size="32").settings == space.settings
    assert not space.free


def test_without_a_batch_it_is_free_and_that_is_said() -> None:
    space = space_of()
    assert len({one.cell.global_batch for one in space.candidates}) > 2
    assert space.free


def test_the_default_is_first_and_the_others_count_how_they_differ() -> None:
    space = space_of(global_batch_size="64", strategy="ddp,fsdp", activation_checkpointing="false")
    assert space.default.complexity == 0
    assert space.default.cell.strategy == "ddp"
    assert space.default.cell.accumulation == 1
    away = {one.cell.strategy: one.complexity for one in space.candidates if one.cell.accumulation == 1}
    assert away["ddp:bucket_mb=5.0"] == 1
    assert away["ddp:bucket_mb=5.0:bucket_view=true"] == 2
    assert away["fsdp"] == 1
    assert away["fsdp:reshard=false"] == 2
    # Another strategy does not have the option that the default has away from its own default.
    calls = space_of(global_batch_size="64", strategy="ddp:bucket_mb=50,fsdp:prefetch=1", accumulation="1")
    assert min(one.complexity for one in calls.candidates if one.cell.strategy.startswith("fsdp")) == 2


def test_an_option_at_its_default_differs_from_another_value_under_another_strategy_too() -> None:
    assert differing({"strategy": "zero1", "bucket_mb": "100.0"}, {"strategy": "ddp"}) == {
        "strategy",
        "bucket_mb",
    }
    assert differing({"strategy": "fsdp", "reshard": "false"}, {"strategy": "ddp"}) == {"strategy"}


def test_the_legal_grids_of_a_size_are_searched_with_their_default_options() -> None:
    space = space_of(workload="llama-nano", gpus="4", global_batch_size="16", oversubscribe=True)
    strategies = {one.cell.strategy for one in space.candidates}
    grids = {name for name in strategies if "cp=" in name or "sequence=true" in name}
    # tp is refused: 2 heads of keys and values do not divide by 4.
    assert grids == {"fsdp:sequence=true:tp=2", "fsdp:cp=2", "fsdp:cp=4", "fsdp:cp=2:sequence=true:tp=2"}
    assert {"fsdp:prefetch=1:tp=2", "pipeline:zbv:dp=2:microbatches=8"} <= strategies


def test_what_auto_chooses_in_a_list_is_a_part_of_the_space() -> None:
    assert values(space_of("strategy: auto\n", global_batch_size="64"), "strategy")


def test_flags_fix_and_list_values_and_win_over_the_file() -> None:
    assert values(space_of(strategy="ddp:bucket_mb=50"), "strategy") == {"ddp"}
    space = space_of("strategy: [fsdp]\naccumulation: [1, 2]\n", strategy="ddp", global_batch_size="64")
    assert {one.cell.accumulation for one in space.candidates} == {1, 2}
    assert values(space, "strategy") == {"ddp"}
    assert values(space, "bucket_mb") == {"5.0", "100.0"}


def test_what_changes_training_needs_a_file() -> None:
    with pytest.raises(UsageError, match="--precision fp32,bf16 changes what is learnt"):
        space_of(precision="fp32,bf16")
    space = space_of("precision: [fp32, bf16]\n", strategy="ddp")
    assert values(space, "precision") == {"fp32", "bf16"}


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("strategys: ddp\n", "did you mean 'strategy'"),
        ("repeats: 3\n", "line 1: repeats is not searched"),
        ("exclude: [{gpus: 2}]\n", "exclude is not searched"),
        ("precision: [fp31]\n", "fp31"),
    ],
)
def test_a_file_is_read_strictly(file, said) -> None:
    with pytest.raises(UsageError, match=said):
        space_of(file)


def test_a_space_in_which_nothing_fits_says_what_is_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"the nearest, .*needs at least .* MiB, and a rank has 1, .* too few"
    ):
        space_of(workload="gpt2-small", memory_limit_mb=1)


def test_memory_that_ran_out_is_told_of_what_is_predicted_alone() -> None:
    told = nothing_fits([(None, "ddp"), (300 * MIB, "fsdp"), (200 * MIB, "zero1")], 400 * MIB, "may need")
    assert "the nearest, zero1, may need 200 MiB, and a rank has 400: " in told
    assert "may need" not in nothing_fits([(None, "ddp")], 400 * MIB, "may need")


def test_memory_of_an_unknown_gpu_excludes_nothing() -> None:
    call = {"workload": "llama-7b", "gpus": "2", "device": "cuda", "strategy": "ddp", "accumulation": "1"}
    options = StudyFile(**call, global_batch_size="2", compile="false", activation_checkpointing="false")

    def space(gpu: str | None) -> Space:
        def requested(point: StudyFile) -> tuple[Request, ...]:
            return make_requests(point, machine_has_cuda=True, source_folder=Path())

        return make_space(options, StudyFile(), requested, Limit(gpus=Devices(gpu_name=gpu)))

    assert space(None).too_large == 0
    assert all(one.fits_by_prediction for one in space(None).candidates)
    with pytest.raises(UsageError, match="needs at least"):
        space("A100-SXM4-80GB")


@pytest.mark.parametrize("name", ["MOST_POINTS", "MOST_SETTINGS"])
def test_a_space_of_too_many_points_or_settings_is_refused(name, monkeypatch) -> None:
    monkeypatch.setattr(space_module, name, 3)
    with pytest.raises(UsageError, match="at most 3 are searched"):
        space_of(global_batch_size="64", strategy="ddp")


def test_the_words_of_a_setting_name_the_part_of_the_cluster() -> None:
    assert call_words(StudyFile(partition="gpu", cpus_per_gpu=4, time="1h")) == [
        "--partition", "gpu", "--cpus-per-gpu", "4"
    ]  # fmt: skip


def test_a_space_without_a_sensible_point_says_why() -> None:
    with pytest.raises(UsageError, match="does not divide"):
        space_of(strategy="ddp", global_batch_size="3")


def test_the_words_of_a_setting_ask_for_its_cell() -> None:
    space = space_of(global_batch_size="64", env=["OMP_WAIT_POLICY=passive"], qos="short")
    assert "--qos short" in " ".join(call_words(space.options_of(space.default)))
    for one in space.candidates[:: max(1, len(space.candidates) // 20)]:
        context = matrix_command.make_context("matrix", call_words(space.options_of(one)))
        flags = {name: value for name, value in context.params.items() if name in StudyFile.__struct_fields__}
        [cell] = plan_of(**flags).cells
        assert cell == one.cell


def test_a_folder_of_an_ordinary_study_is_refused() -> None:
    Study(Path("runs/there")).add_plan(plan_of(workload="mlp", gpus="1"))
    with pytest.raises(UsageError, match="no tune has made"):
        Tune(StudyFile(workload="mlp", gpus="2", device="cpu", name="there")).run(report=False)


def test_a_dry_run_says_how_many_settings_and_how_long(tmp_path) -> None:
    words = ["--workload", "mlp", "--gpus", "2", "--device", "cpu", "--strategy", "ddp", "--dry-run"]
    told = CliRunner().invoke(tune_command, words, obj=("tune", *words), standalone_mode=False).output
    assert "settings that may fit" in told
    assert "refused" in told
    assert "predicted not to fit" in told
    assert "device-hours" in told
    assert re.search(r"a --max-time of 10 min 00 s tries about \d+ of \d+ settings, first of all: ddp", told)
    assert not any(tmp_path.iterdir())


def test_a_machine_that_is_too_small_is_named_before_rules_of_single_points(tmp_path) -> None:
    """More points are refused because `single` takes one rank, and none of these is near to running."""
    call = StudyFile(
        workload="gpt-nano", gpus="4096", device="cpu", global_batch_size="4096", compile="false",
        out=str(tmp_path / "study"),
    )  # fmt: skip
    with pytest.raises(UsageError, match="this machine has"):
        Tune(call).show()
