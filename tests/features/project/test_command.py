"""`bench project` on a study on disk: its file, its table, a network table, and what it refuses to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from builders import a_cell, an_environment, parts_of
from generated_study import GPU, large_study

from harness.cli import run
from harness.features.project.call import outside_of
from harness.features.project.project import projected_series
from harness.features.project.records import PROJECTION, ProjectedSeries, Projection, digest, projection_path
from harness.features.project.refusals import Outside
from harness.features.project.replays import Replayer, other_network
from harness.features.project.section import remarks, size_table
from harness.features.project.series import REPLAY
from harness.plan.surroundings import Measured
from harness.reporting.assumptions import CostFlags
from harness.reporting.studies import read_figures
from harness.terminal.console import Console
from reports.page.render import render_figures
from results import schemas
from results.errors import UsageError
from results.network import Measurement, NetworkFacts, NetworkTable
from results.outcome import Evidence
from results.store import Study
from strategies.closed_form.terms import wire_factor
from strategies.predictions import traffic

MS = 1_000_000
STEPS = {2: 10.1, 4: 10.2, 8: 10.2}
HERE = an_environment(nccl="2.27")
GROUPS = ((2, 1), (4, 1), (8, 1), (16, 2))


def a_table(inside: float = 10e9, across: float = 1e9, groups=GROUPS, environment=HERE) -> NetworkTable:
    """All-reduces over a ring with 10 us of latency and these bytes a second."""
    rows = []
    for ranks, nodes in groups:
        rate = inside if nodes == 1 else across
        for size in (2**16, 2**20, 2**22, 2**26, 2**28):
            seconds = 1e-5 + 2 * (ranks - 1) / ranks * size / rate
            rows.append(Measurement.of(("all-reduce", size, ranks, nodes), *[seconds] * 3, 6))
    return NetworkTable(
        source="bench",
        measured_at="2026-01-02T03:04:05.000Z",
        facts=NetworkFacts.of(environment, a_cell(device="cuda", backend="nccl")),
        evidence=Evidence.MEASURED,
        measurements=tuple(rows),
    )


@pytest.fixture
def study(planted, new_timing) -> Path:
    """`single` on 1 and `ddp` up to a node of 8, whose ranks compute for 10 ms."""
    planted.device = "cuda"

    def timing(ms: float):
        return new_timing(step_ms=ms, input_ms=0.0, off_step_ns=lambda rank: [10 * MS] * 8, environment=HERE)

    alone = planted.series("weak", "single", [1], batch=8, optimizer="sgd")
    cells = planted.series("weak", "ddp", [*STEPS], batch=8, optimizer="sgd")
    planted.plan(repeats=2)
    for cell, ms in zip([*alone, *cells], [10.0, *STEPS.values()], strict=True):
        for _ in range(2):
            planted.run(cell, timing(ms), sync=False)
    return planted.study.root


def project(study: Path, *words: str, to: int = 16) -> Projection:
    assert run(["project", str(study), "--to", str(to), *words]) == 0
    return PROJECTION.read(projection_path(Study(study)))


def step_ms(found: Projection, gpus: int) -> float:
    return step_of(found.series[0], gpus)


def step_of(series: ProjectedSeries, gpus: int) -> float:
    [size] = [size for size in series.sizes if size.gpus == gpus]
    return size.step_ns.value / MS


def test_a_projection_is_kept_printed_and_drawn_and_a_changed_study_makes_it_stale(
    study, planted, new_timing, capsys
) -> None:
    project(study)
    line, path = capsys.readouterr().out.splitlines()
    assert line.startswith("every size up to 16 is refused: sizes were measured inside of a node")
    assert path.startswith("projection: ")
    found = project(study, "--price", "3.6", "--epoch-samples", "1000000", "-v")
    told = capsys.readouterr().out
    assert "refused: node boundary" in told
    assert "--gpus 16" in told
    assert [size.basis for series in found.series for size in series.sizes] == [*["measured"] * 4, "refused"]
    assert found.command.endswith("--to 16 --price 3.6 --epoch-samples 1000000")
    [series] = found.series
    assert series.sizes[0].usd_per_epoch is not None
    assert run(["report", str(study)]) == 0
    assert "stale" not in (study / "report.html").read_text()
    words = ("--exclude", "ddp on 8, batch 8 a replica, run 2", "--reason", "hot", "--author", "Ann")
    assert run(["review", str(study), *words]) == 0
    assert run(["report", str(study)]) == 0
    assert "This projection is stale" in (study / "report.html").read_text()
    project(study)
    planted.run(next(iter(planted.study.plans()[0].cells)), new_timing(step_ms=10.0, environment=HERE))
    assert run(["report", str(study)]) == 0
    assert "This projection is stale" in (study / "report.html").read_text()


def test_a_network_table_does_not_lift_the_refusal_of_the_node_boundary(study, tmp_path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(schemas.NETWORK.encode(a_table()))
    [series] = project(study, "--network", str(path)).series
    assert {size.refusal.kind for size in series.of("refused")} == {"node boundary"}


def test_a_network_table_answers_inside_of_a_node_by_a_replay(study, planted, new_timing, tmp_path) -> None:
    # Another series shows that a node has 16 devices.
    [other] = planted.series("weak", "fsdp", [16], batch=8, optimizer="sgd")
    planted.plan(repeats=1)
    planted.run(other, new_timing(step_ms=11.0, environment=HERE), sync=False)
    path = tmp_path / "table.json"
    groups = ((2, 1), (4, 1), (8, 1), (16, 1))
    path.write_bytes(schemas.NETWORK.encode(a_table(groups=groups)))
    found = project(study, "--network", str(path))
    assert found.series[0].law == REPLAY
    # 10 ms of computation, and what a node at 10 GB/s needs beyond the backward pass.
    assert step_ms(found, 16) > step_ms(found, 8)
    faster = project(study, "--network", str(path), "--what-if", "intra_node_gbps=800")
    assert step_ms(faster, 16) < step_ms(found, 16)
    assert faster.what_if == ("intra_node_gbps=800",)
    assert "intra_node_gbps measured 79.98" in faster.network
    shown = size_table(faster.series[0])
    assert "not validated" in str(shown.rows)
    assert "each family" not in " ".join(remarks(faster))
    # The table in the study's folder is taken where none is given.
    (study / "network.json").write_bytes(path.read_bytes())
    assert step_ms(project(study), 16) == step_ms(found, 16)


def test_a_table_that_lacks_a_collective_is_noticed(study, tmp_path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(schemas.NETWORK.encode(a_table(groups=GROUPS[:3])))
    [series] = project(study, "--network", str(path)).series
    [refused] = series.of("refused")
    assert refused.refusal.kind == "node boundary"
    assert "does not cover 16 ranks on 2 nodes" in refused.refusal.reason


def test_one_device_alone_has_no_messages_to_replay(planted, new_timing, tmp_path) -> None:
    planted.device = "cuda"
    [alone] = planted.series("weak", "single", [1], batch=8, optimizer="sgd")
    planted.plan()
    planted.run(alone, new_timing(step_ms=10.0, input_ms=0.0, off_step_ns=lambda rank: [10 * MS] * 8))
    path = tmp_path / "table.json"
    path.write_bytes(schemas.NETWORK.encode(a_table(environment=an_environment(nccl=None))))
    [series] = project(planted.study.root, "--network", str(path), to=2).series
    [refused] = series.of("refused")
    assert refused.refusal.kind == "one size"
    assert "--strategy ddp --gpus 2" in refused.refusal.lift.command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "4"), "give a larger size"),
        (("--to", "16", "--network", "gone.json"), "gone.json"),
        (("--to", "16", "--what-if", "inter_node_gbps=800"), "give --network"),
        (("--to", "16", "--network", "TABLE", "--what-if", "speed=1"), "inter_node_gbps=VALUE"),
        (("--to", "16", "--network", "TABLE", "--what-if", "inter_node_gbps=1e-320"), "from 0.001"),
        (("--to", "16", "--network", "TABLE", "--what-if", "inter_node_gbps=nan"), "from 0.001"),
        (
            ("--to", "16", "--network", "TABLE", *("--what-if", "inter_node_gbps=1") * 2),
            "is given twice",
        ),
        (("--to", "16", "--network", "INSIDE", "--what-if", "inter_node_gbps=1"), "over several nodes"),
        (("--to", "16", "--network", "TORN"), "was damaged or edited"),
        (("--to", "16", "--network", "OTHER"), "of another machine or network"),
    ],
)
def test_bad_input_is_a_sentence_with_the_fix_and_writes_nothing(
    study, tmp_path, capsys, monkeypatch, words, says
) -> None:
    monkeypatch.chdir(tmp_path)
    good = schemas.NETWORK.encode(a_table())
    Path("TABLE").write_bytes(good)
    Path("TORN").write_bytes(good[: len(good) // 2])
    Path("INSIDE").write_bytes(schemas.NETWORK.encode(a_table(groups=GROUPS[:3])))
    other = msgspec.structs.replace(HERE, device_name="NVIDIA H100 80GB HBM3")
    Path("OTHER").write_bytes(schemas.NETWORK.encode(a_table(environment=other)))
    assert run(["project", str(study), *words]) in (1, 2)
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert not (study / "projection.json").exists()


def test_an_excluded_run_is_no_measurement_to_plan_by(study) -> None:
    kept = Study(study)
    known = Measured.of_study(kept, kept.results())
    for name in ("single on 1", *(f"ddp on {size}" for size in STEPS)):
        for number in (1, 2):
            call = ("--exclude", f"{name}, batch 8 a replica, run {number}", "--reason", "hot")
            assert run(["review", str(study), *call, "--author", "Ann"]) == 0
    assert known.works
    assert not Measured.of_study(kept, kept.results()).works


def test_a_damaged_projection_costs_the_report_only_its_section(study, capsys) -> None:
    (study / "projection.json").write_text("{")
    assert run(["report", str(study)]) == 0
    assert "bench project" in capsys.readouterr().err
    assert 'id="projection"' not in (study / "report.html").read_text()


def test_a_redacted_report_has_no_projection(study) -> None:
    project(study)
    [figures] = read_figures([str(study)], CostFlags(), Console(), redact=True)
    assert figures.added["projection"] is None


def test_a_size_must_fit_the_room_that_a_plan_leaves(study) -> None:
    [figures] = read_figures([str(study)], CostFlags(), Console())
    one, outside = next(iter(figures.cells.values())), outside_of(Study(study), figures, None)
    assert 0 < outside.room(one) < 0.95 * 80e9
    cell = msgspec.structs.replace(one.cell, memory_limit_mb=1000)
    limited = replace(one, pool=replace(one.pool, cell=cell))
    assert outside.room(limited) == 950 * 2**20


def test_another_rate_keeps_the_latency() -> None:
    table = a_table(groups=((16, 2),))
    # The highest busbw is just below 1 GB/s, 8 Gbit/s.
    faster = other_network(table, ["inter_node_gbps=80"])
    slow, fast = (one.measurements[-1].median_s for one in (table, faster))
    assert fast == pytest.approx(slow / 10, rel=0.01)
    assert faster.measurements[0].median_s == pytest.approx(table.measurements[0].median_s)
    with pytest.raises(UsageError, match="inside a node"):
        other_network(table, ["intra_node_gbps=80"])


def test_a_generated_study_of_32_gpus_is_drawn_to_256_by_a_network_table(monkeypatch, tmp_path) -> None:
    """Steps of 1 to 32 GPUs by a queue of the buckets, written here, over 20 GB/s between nodes."""
    groups = ((2, 1), (4, 1), (8, 1), (16, 2), (32, 4))
    table = a_table(180e9, 20e9, groups, GPU)
    study = large_study(sizes=(2, 4, 8, 16, 32))

    def step_s(figures) -> float:
        cell, compute = figures.cell, figures.newest.budget.compute_ns / 1e9
        forward, update = 0.31 * compute, 0.1 * compute
        backward, free = compute - forward - update, 0.0
        for term in traffic(cell, parts_of(cell.workload)):
            for size, share in term.pieces:
                rate = 180e9 if cell.gpus <= 8 else 20e9
                took = 1e-5 + wire_factor("all-reduce", cell.gpus) * size / rate
                free = max(free, forward + share * backward) + took
        return max(free, forward + backward) + update

    [curve] = [one for one in study.curves if (one.key.kind, one.key.label) == ("weak", "ddp")]
    points = []
    for point in curve.points:
        figures, ns = point.figures, 1e9 * step_s(point.figures)
        step = msgspec.structs.replace(figures.step_ns, value=ns, low=0.99 * ns, high=1.01 * ns)
        points.append(replace(point, figures=replace(figures, step_ns=step, run_step_ns=(ns,) * 3)))
    study = replace(study, curves=(replace(curve, points=tuple(points)),))
    replayer = Replayer(study=Study(tmp_path), figures=study, table=table)
    [found] = projected_series(study, 256, Outside(replay=replayer))
    # More nodes than the table has are less certain.
    known = replace(replayer, table=a_table(180e9, 20e9, (*groups, (256, 32)), GPU))
    [narrow] = projected_series(study, 256, Outside(replay=known))
    wide, own = (one.of("projected")[-1].step_ns for one in (found, narrow))
    assert wide.high / wide.value > own.high / own.value
    # 32 was measured on this network: another one changes what is asked for alone, and no law answers it.
    other = replace(replayer, other=other_network(table, ["inter_node_gbps=1600"]))
    [faster] = projected_series(study, 256, Outside(replay=other, what_if=True))
    assert (faster.law, faster.of("measured")) == (REPLAY, found.of("measured"))
    assert step_of(faster, 64) < step_of(found, 64)
    [without] = projected_series(study, 64, Outside(what_if=True))
    assert {size.refusal.kind for size in without.of("refused")} == {"what-if"}
    # 100 do not fill nodes of 8, and 20 million are too far to be replayed: 64 are projected all the same.
    for to, kind in ((100, "not replayed"), (20_000_000, "too far")):
        [other_end] = projected_series(study, to, Outside(replay=replayer))
        assert other_end.sizes[-1].refusal.kind == kind
        assert step_of(other_end, 64) == step_of(found, 64)
    assert found.law == REPLAY
    assert [size.gpus for size in found.of("projected")] == [64, 128, 256]
    made = Projection(digest=digest(study), to=256, command="c", network="t", what_if=(), series=(found,))
    assert 'class="ahead"' in render_figures(replace(study, added={"projection": made}))
    # Constant efficiency refuses the same study: its steps grow by more than 10 % at the node boundary.
    [without] = projected_series(study, 256, Outside())
    assert {size.refusal.kind for size in without.of("refused")} == {"irregular"}
