"""`reports.load`: single steps, phases and operations of each rank, read when they are asked for."""

from __future__ import annotations

import msgspec
import pytest

import reports
from results import schemas
from results.errors import UsageError
from results.record import Operations, Recorded, StepColumns

STEPS = StepColumns(
    step_ns=[10, 20],
    data_ns=[1, 2],
    forward_ns=[3, 6],
    backward_ns=[4, 8],
    optimizer_ns=[2, 4],
    loss=[1.5, None],
)
PLACES = {"step": [0, 0], "name": [1, 0], "group": [0, 0]}
TIMES = {"payload_bytes": [4096, 8], "issued_ns": [5, 7], "duration_ns": [3, 1]}
OPERATIONS = Operations(names=["allreduce", "send"], groups=["0-1"], **PLACES, **TIMES)


@pytest.fixture
def runs(planted) -> list[str]:
    """Two runs of ddp on 2, whose rank 1 has other columns than its neighbour."""
    (cell,) = planted.points("ddp", {2: [10.0, 11.0]})
    planted.plan()
    ids = planted.study.run_ids(cell.id)
    path = planted.study.rank_path(cell.id, ids[0], 1)
    record = schemas.RANK_RECORD.read(path)
    times = len(record.steps.step_ns) // 2
    steps = StepColumns(**{name: getattr(STEPS, name) * times for name in STEPS.__struct_fields__})
    recorded = Recorded(step_ns=[11], operations=OPERATIONS)
    changed = msgspec.structs.replace(record, steps=steps, recorded=recorded)
    path.write_bytes(schemas.RANK_RECORD.encode(changed))
    return ids


def test_a_row_is_a_step_of_a_rank(runs, planted) -> None:
    study = reports.load(planted.study.root)
    steps = study.steps(runs[0])
    own = steps[steps["rank"] == 1].drop(columns=["study", "cell_id", "run_id", "rank"])
    assert [*own.columns] == ["step", *STEPS.__struct_fields__]
    assert own.iloc[0].tolist() == [0, 10, 1, 3, 4, 2, 1.5]
    assert own.iloc[1].tolist()[:-1] == [1, 20, 2, 6, 8, 4]
    assert own["loss"].isna().tolist()[:2] == [False, True]
    phases = study.phases(runs[0])
    mine = phases[(phases["rank"] == 1) & (phases["step"] == 1)].set_index("phase")["duration_ns"]
    assert mine.to_dict() == {"data": 2, "forward": 6, "backward": 8, "optimizer": 4}


def test_a_row_is_an_operation_of_a_rank(runs, planted) -> None:
    operations = reports.load(planted.study.root).operations(runs[:1])
    found = operations.drop(columns=["study", "cell_id"]).to_dict("split", index=False)
    assert found["columns"] == ["run_id", "rank", "step", "operation", "group", *TIMES]
    assert found["data"] == [
        [runs[0], 1, 0, "send", "0-1", 4096, 5, 3],
        [runs[0], 1, 0, "allreduce", "0-1", 8, 7, 1],
    ]


def test_only_records_of_the_runs_that_are_asked_for_are_read(runs, planted, monkeypatch) -> None:
    planted.study.collect()
    read: list[str] = []
    original = type(planted.study).rank_records

    def watched(self, cell_id: str, run_id: str):
        read.append(run_id)
        return original(self, cell_id, run_id)

    monkeypatch.setattr(type(planted.study), "rank_records", watched)
    study = reports.load(planted.study.root)
    assert read == []
    one = study.steps(runs[1])
    assert read == [runs[1]]
    every = study.steps()
    assert read == [runs[1], *runs]
    assert len(every) == len(one) + len(study.steps(study.runs["run_id"].iloc[:1]))
    assert (one.dtypes == every.dtypes).all()


def test_no_run_gives_the_columns_with_their_types_and_an_unknown_one_is_a_sentence(runs, planted) -> None:
    study = reports.load(planted.study.root)
    for read in (study.steps, study.operations):
        assert len(read([])) == 0
        assert (read([]).dtypes == read().dtypes).all()
    with pytest.raises(UsageError, match="did you mean"):
        study.steps(f"{runs[0][:-1]}9")
