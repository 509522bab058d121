"""Settings of which several values are given: a request, and so a plan, for each combination."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.matrix import matrix_command as command
from harness.launch.command import worker_environment
from harness.plan.expand import expand
from harness.plan.request import default_name, make_requests, study_name
from harness.plan.schedule import schedule
from harness.plan.study_file import SETTINGS, StudyFile
from harness.worker.rank.context import without_own
from reports.analysis.series import setting_labels, told_settings
from results.cell import Cell
from results.environment import CodeVersion
from results.errors import UsageError
from results.launch import Launch
from results.outcome import Evidence
from results.plan import Request


def requests(**given: object) -> tuple[Request, ...]:
    options = StudyFile(workload="mlp", gpus=1, device="cpu", **given)
    return make_requests(options, machine_has_cuda=False, source_folder=Path())


def test_every_combination_is_a_request_and_the_last_setting_changes_first() -> None:
    found = requests(precision="fp32,bf16", accumulation=[1, "2"], seed=7)
    made = [(one.precision, one.accumulation, one.seed) for one in found]
    assert made == [("fp32", 1, 7), ("fp32", 2, 7), ("bf16", 1, 7), ("bf16", 2, 7)]


@pytest.mark.parametrize(
    ("name", "value", "made"),
    [
        ("dataset", "synthetic,digits", ["synthetic", "digits"]),
        ("precision", ["fp32", "bf16"], ["fp32", "bf16"]),
        ("accumulation", "1,4", [1, 4]),
        ("optimizer", "sgd:lr=0.1,adamw,sgd", ["sgd", "adamw"]),
        ("clip_norm", ["none", 1, "0.5"], [None, 1.0, 0.5]),
        ("activation_checkpointing", "false,true,selective", [False, True, "selective"]),
        ("compile", [False, "true"], [False, True]),
        ("memory_format", "contiguous, channels_last", ["contiguous", "channels_last"]),
        ("seed", [3, 1], [3, 1]),
    ],
)
def test_each_setting_takes_a_text_with_commas_or_a_list(name, value, made) -> None:
    assert name in SETTINGS
    assert [getattr(one, name) for one in requests(**{name: value})] == made


def test_the_name_of_a_study_of_several_settings_is_of_all_of_them() -> None:
    both, first = requests(precision="fp32,bf16"), requests(precision="fp32")
    assert default_name(*first) != default_name(*both) != default_name(*requests(precision="bf16,fp16"))
    assert study_name(*both, name="mine") == "mine"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("precision", "fp32,fp8", "--precision takes fp32, tf32, bf16, fp16 or float8, not 'fp8'"),
        ("compile", "true,maybe", "--compile takes true or false, not 'maybe'"),
        ("activation_checkpointing", "some", r"takes all \(true\), none \(false\) or selective, not 'some'"),
        ("clip_norm", "none,high", "--clip-norm takes a number or none, such as none,1.0, not 'high'"),
        ("clip_norm", ["none", 0], "--clip-norm takes a number or none, more than 0 and at most .* not 0.0"),
        ("compile", " , ", "--compile is empty"),
    ],
)
def test_a_value_that_no_setting_has_is_refused_by_its_name(name, value, message) -> None:
    with pytest.raises(UsageError, match=message):
        requests(**{name: value})


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (("--compile",), "true"),
        (("--no-compile",), "false"),
        (("--compile", "false,true"), "false,true"),
        (("--compile=true",), "true"),
        ((), None),
    ],
)
def test_a_bare_switch_is_true_and_takes_no_study_file_for_its_value(words, made) -> None:
    context = command.make_context("matrix", [*words, "study.yaml"])
    assert (context.params["compile"], context.params["study_file"]) == (made, "study.yaml")


def test_a_plan_tells_what_is_not_the_default() -> None:
    plans = [
        expand(one, study="s", created_at="")
        for one in requests(clip_norm="none,1", compile=True, accumulation=1)
    ]
    assert told_settings(plans) == ["clip_norm=none,1.0", "compile=yes"]


def cells_of(*variables: str) -> list[Cell]:
    options = StudyFile(workload="mlp", strategy="ddp", gpus=2, env=list(variables) or None)
    requests = make_requests(options, machine_has_cuda=False, source_folder=Path())
    return [cell for request in requests for cell in expand(request, study="s", created_at="").cells]


def test_every_combination_of_values_is_a_cell_with_launches_and_a_label_of_its_own() -> None:
    cells = cells_of("NCCL_ALGO=Ring", "NCCL_ALGO=Tree", "NCCL_IB_HCA=mlx5_0,mlx5_1")
    assert [cell.env for cell in cells] == [
        ("NCCL_ALGO=Ring", "NCCL_IB_HCA=mlx5_0,mlx5_1"),
        ("NCCL_ALGO=Tree", "NCCL_IB_HCA=mlx5_0,mlx5_1"),
    ]
    launches = schedule(cells, repeats=1)
    assert sorted(launch.env for launch in launches) == [cell.env for cell in cells]
    assert set(setting_labels(cells).values()) == {"NCCL_ALGO=Ring", "NCCL_ALGO=Tree"}
    assert set(setting_labels([*cells_of(), *cells_of("A=1")]).values()) == {"A=1", "A=unset"}


def test_the_order_of_variables_and_their_absence_do_not_change_an_id() -> None:
    assert cells_of("B=1", "A=2")[0].id == cells_of("A=2", "B=1")[0].id
    assert "env" not in cells_of()[0].id
    assert len({cell.id for cell in (*cells_of(), *cells_of("A=1"), *cells_of("A=2"))}) == 3


@pytest.mark.parametrize(
    "text", ["NCCL_ALGO", "=x", "A B=1", "A=1\n", "RANK=0", "OMP_NUM_THREADS=2", "HF_TOKEN=x", "my_key=x"]
)
def test_what_is_no_variable_is_set_by_bench_or_may_be_a_secret_is_refused(text) -> None:
    with pytest.raises(UsageError):
        cells_of(text)


def test_names_that_only_contain_a_word_of_secrets_are_allowed() -> None:
    assert cells_of("TOKENIZERS_PARALLELISM=false")[0].env == ("TOKENIZERS_PARALLELISM=false",)


def test_ranks_have_the_variables_and_do_not_record_them_as_conditions(tmp_path) -> None:
    (cell,) = cells_of("MALLOC_ARENA_MAX=a=1")
    (planned,) = schedule([cell], repeats=1)
    launch = Launch(
        launch_id="x",
        placement=planned.placement,
        device="cpu",
        backend="gloo",
        evidence=Evidence.MEASURED,
        slots=(),
        code=CodeVersion(code_hash=""),
        env=planned.env,
    )
    assert worker_environment(launch, tmp_path)["MALLOC_ARENA_MAX"] == "a=1"
    assert without_own({"MALLOC_ARENA_MAX": "a=1", "LD_PRELOAD": "x"}, cell) == {"LD_PRELOAD": "x"}
