"""`--env`: environment variables of the ranks as a setting of the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.launch.command import worker_environment
from harness.plan.expand import expand
from harness.plan.request import make_requests
from harness.plan.schedule import schedule
from harness.plan.study_file import StudyFile
from harness.worker.rank.context import without_own
from reports.analysis.series import setting_labels
from results.cell import Cell
from results.environment import CodeVersion
from results.errors import UsageError
from results.launch import Launch
from results.outcome import Evidence


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
