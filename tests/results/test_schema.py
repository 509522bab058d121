"""A schema refuses newer files, other kinds and every sort of damage, and migrates old files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results import schemas
from results.errors import SchemaError, StoreError
from results.files import Content
from results.record import RankRecord, StepColumns
from results.schema import Schema
from results.statistics import Metric

GOLDEN = Path(__file__).with_name("golden")

SCHEMAS: dict[str, Schema[Any]] = {
    schema.name: schema for schema in vars(schemas).values() if isinstance(schema, Schema)
}


def _newest(name: str) -> Path:
    return GOLDEN / f"{name}-{SCHEMAS[name].version}.json"


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(SchemaError) as error:
        schemas.PLAN.read(_newest("cell"))
    assert str(error.value) == f"{_newest('cell')} holds a bench/cell, not a bench/plan"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Input data was truncated"),
        (b"\0" * 64, "JSON is malformed"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `schema`"),
        (b'{"schema":"bench/cell"}', "missing required field `schema_version`"),
        (b'{"schema":"bench/cell","schema_version":0}', "Expected `int` >= 1"),
        (b'{"schema":"bench/cell","schema_version":"1"}', "Expected `int`, got `str`"),
        (b'{"schema":"bench/cell","schema_version":1}', "missing required field `workload`"),
        (b'{"schema":"bench/cell","schema_version":1,"workload":"\xff"}', "can't decode byte 0xff"),
        (b'{"a":' * 100, "it nests more than 64 levels deep"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, text, why) -> None:
    path = tmp_path / "cell.json"
    path.write_bytes(text)
    with pytest.raises(SchemaError) as error:
        schemas.CELL.read(path)
    assert str(error.value).startswith(f"{path} is not a readable cell: ")
    assert why in str(error.value)
    assert str(error.value).endswith("move it away and run the same command again")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"gpus":2', '"gpus":"two"', "Expected `int`, got `str` - at `$.gpus`"),
        ('"outcome":"proof_failed"', '"outcome":"fine"', "Invalid enum value 'fine' - at `$.outcome`"),
        (
            '"step_ns":[8,7]',
            '"step_ns":[8]',
            "the columns differ in length: {'step_ns': 1, 'data_ns': 2, 'forward_ns': 2, "
            "'backward_ns': 2, 'optimizer_ns': 2, 'loss': 2} - at `$.steps`",
        ),
        (
            '"on_first_ns":[16]',
            '"on_first_ns":[]',
            "the columns of the quads differ in length: {'on_first_ns': 0, 'off_first_ns': 1, "
            "'off_second_ns': 1, 'on_second_ns': 1} - at `$.quads`",
        ),
    ],
)
def test_an_edited_record_is_refused_with_its_path_and_field(old, new, why) -> None:
    text = _newest("rank-record").read_text(encoding="ascii")
    assert text.count(old) == 1
    with pytest.raises(SchemaError) as error:
        schemas.RANK_RECORD.decode(Content(Path("here/rank-00001.json"), text.replace(old, new).encode()))
    assert str(error.value).startswith(f"here/rank-00001.json is not a readable rank-record: {why};")


@given(data=st.data())
def test_no_change_of_bytes_gives_anything_but_an_object_or_a_schema_error(data) -> None:
    whole = bytearray(_newest("rank-record").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        record = schemas.RANK_RECORD.decode(Content(Path("file.json"), bytes(whole)))
    except SchemaError as error:
        assert str(error).startswith("file.json ")  # noqa: PT017
    else:
        assert isinstance(record, RankRecord)


def test_a_file_that_is_not_there_is_one_line(tmp_path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*plan-0001.json: No such file or directory"):
        schemas.PLAN.read(tmp_path / "plan-0001.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_never_reach_a_file(value) -> None:
    result = schemas.RUN_RESULT.read(_newest("run-result"))
    metric = Metric(value=value, unit="ns", low=None, high=None, samples=1, interval=None)
    for fields in ({"step_ns": metric}, {"phase_ns": {"data": value}}):
        with pytest.raises(msgspec.ValidationError, match="Expected `float`, got `null`"):
            schemas.RUN_RESULT.encode(msgspec.structs.replace(result, **fields))


def test_where_null_means_unknown_nan_becomes_unknown() -> None:
    record = schemas.RANK_RECORD.read(_newest("rank-record"))
    columns = msgspec.structs.replace(record.steps, loss=[float("nan"), 1.0])
    data = schemas.RANK_RECORD.encode(msgspec.structs.replace(record, steps=columns))
    assert b"NaN" not in data
    assert schemas.RANK_RECORD.decode(Content(Path("file.json"), data)).steps.loss == [None, 1.0]


class Lap(msgspec.Struct, frozen=True, kw_only=True):
    """The third version of a toy schema: version 1 had whole seconds, version 2 no runner."""

    lap_ns: int
    runner: str | None


def _to_nanoseconds(old: dict[str, Any]) -> dict[str, Any]:
    return {"lap_ns": old["lap_s"] * 10**9}


def _with_runner(old: dict[str, Any]) -> dict[str, Any]:
    return {**old, "runner": None}


LAP = Schema("lap", 3, Lap, upgrades={1: _to_nanoseconds, 2: _with_runner})


@pytest.mark.parametrize(
    ("text", "lap"),
    [
        (b'{"schema":"bench/lap","schema_version":1,"lap_s":61}', Lap(lap_ns=61 * 10**9, runner=None)),
        (b'{"schema":"bench/lap","schema_version":2,"lap_ns":5}', Lap(lap_ns=5, runner=None)),
        (
            b'{"schema":"bench/lap","schema_version":3,"lap_ns":5,"runner":"ada"}',
            Lap(lap_ns=5, runner="ada"),
        ),
    ],
)
def test_an_old_file_goes_up_one_step_at_a_time(text, lap) -> None:
    assert LAP.decode(Content(Path("lap.json"), text)) == lap
    written = LAP.encode(lap)
    assert b'"schema_version":3' in written
    assert LAP.decode(Content(Path("lap.json"), written)) == lap


def _older_record(warmup: object) -> bytes:
    raw = msgspec.json.decode((GOLDEN / "rank-record-4.json").read_bytes())
    return msgspec.json.encode(raw | {"warmup": warmup})


def test_of_the_warm_up_of_an_older_record_the_losses_are_kept() -> None:
    columns = {name: [1_000_000 + step for step in range(500)] for name in StepColumns.__struct_fields__}
    older = _older_record(columns)
    record = schemas.RANK_RECORD.decode(Content(Path("rank.json"), older))
    assert record.warmup_loss == columns["loss"]
    assert len(older) - len(schemas.RANK_RECORD.encode(record)) > 4 * len(
        msgspec.json.encode(columns["loss"])
    )


@pytest.mark.parametrize("warmup", [[], {"loss": ["fast"]}, {"loss": 7}])
def test_an_older_record_with_a_damaged_warm_up_is_refused(warmup) -> None:
    with pytest.raises(SchemaError, match=r"rank.json is not a readable rank-record"):
        schemas.RANK_RECORD.decode(Content(Path("rank.json"), _older_record(warmup)))


def test_an_old_file_that_is_damaged_is_refused_after_its_upgrade() -> None:
    with pytest.raises(SchemaError, match=r"lap.json is not a readable lap: Expected `int`, got `str`"):
        LAP.decode(Content(Path("lap.json"), b'{"schema":"bench/lap","schema_version":2,"lap_ns":"fast"}'))
