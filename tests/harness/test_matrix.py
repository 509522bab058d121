"""The main job, really run: torchrun, two ranks, rank files, a report; figures recomputed by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from results.store import Study

QUICK = ("--device", "cpu", "--batch-size", "8", "--budget", "0")


def _runs(study: Study) -> dict[str, list[list[dict[str, object]]]]:
    """Rank files by cell and run, read by plain JSON: the program's own readers are not used."""
    cells: dict[str, list[list[dict[str, object]]]] = {}
    for folder in sorted(study.root.glob("cells/*/*/")):
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
        cells.setdefault(folder.parent.name, []).append(ranks)
    return cells


def test_the_matrix_ends_well_with_its_headline_and_the_report(small_study) -> None:
    study, done = small_study
    assert done.returncode == 0, done.stderr
    assert "serial-simulation" in done.stdout
    assert done.stdout.splitlines()[-2] == "report: study/report.html"
    assert (study.root / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_every_cell_has_its_repeats_and_every_run_its_ranks(small_study) -> None:
    study, _ = small_study
    cells = _runs(study)
    # single at 32 (weak) and 64 (strong on one rank); ddp at 32 (weak, and strong on two): 3 cells.
    assert sorted((ranks[0][0]["gpus"], len(ranks)) for ranks in cells.values()) == [(1, 2), (1, 2), (2, 2)]
    assert all(len(ranks) == ranks[0]["gpus"] for runs in cells.values() for ranks in runs)
    repeats = {cell: [ranks[0]["repeat"] for ranks in runs] for cell, runs in cells.items()}
    assert all(found == [1, 2] for found in repeats.values())


def test_a_cell_is_proven_once_and_says_by_which_run(small_study) -> None:
    study, _ = small_study
    for runs in _runs(study).values():
        first, second = (ranks[0]["proof"] for ranks in runs)
        assert (first["method"], second["method"]) == ("serial-simulation", "earlier-run")
        assert first["max_difference"] == first["max_bound"] == 0.0
        assert runs[0][0]["run_id"] in second["detail"]


def test_the_table_agrees_with_hand_calculation_from_the_rank_files(small_study) -> None:
    study, _ = small_study
    with (study.root / "cells.csv").open(newline="") as file:
        rows = {row["cell_id"]: row for row in csv.DictReader(file)}
    for cell, runs in _runs(study).items():
        step_times = []
        for ranks in runs:
            walls = [max(block) for block in zip(*(rank["blocks_ns"] for rank in ranks), strict=True)]
            step_times.append(sum(walls) / len(walls) / ranks[0]["block_steps"])
        step_ns = sum(step_times) / len(step_times)
        assert float(rows[cell]["step_ns"]) == _close(step_ns)
        images = sum(rank["work"]["samples"] for rank in runs[0])
        assert float(rows[cell]["units_per_s"]) == _close(images / (step_ns / 1e9))
        assert float(rows[cell]["step_ns_low"]) == _close(min(step_times))
        assert float(rows[cell]["step_ns_high"]) == _close(max(step_times))


def test_exposed_communication_agrees_with_hand_calculation(small_study) -> None:
    study, _ = small_study
    with (study.root / "runs.csv").open(newline="") as file:
        rows = {row["run_id"]: row for row in csv.DictReader(file)}
    checked = 0
    for runs in _runs(study).values():
        for ranks in (ranks for ranks in runs if len(ranks) == 2):
            first, second = (rank["quads"] for rank in ranks)
            total = 0.0
            for name, sign in (("on_first", 1), ("off_first", -1), ("off_second", -1), ("on_second", 1)):
                total += sign * max(first[f"{name}_ns"][0], second[f"{name}_ns"][0])
            assert float(rows[ranks[0]["run_id"]]["exposed_ns"]) == _close(total / (2 * first["steps"]))
            checked += 1
    assert checked == 2


def test_replicas_end_equal_and_losses_fall_from_the_logarithm_of_ten(small_study) -> None:
    study, _ = small_study
    for runs in _runs(study).values():
        for ranks in runs:
            assert len({rank["parameters_hash"] for rank in ranks}) == 1
            losses = ranks[0]["warmup_loss"] + ranks[0]["steps"]["loss"]
            assert losses[-1] < losses[0] < 3.5


def test_the_plan_on_disk_is_what_a_dry_run_shows(small_study, bench_in) -> None:
    study, _ = small_study
    shown = bench_in(study.root.parent)(
        "matrix", "--workload", "mlp", "--batch-size", "32", "--gpus", "1..2", "--device", "cpu", "--budget",
        "0", "--block-steps", "2", "--quads", "1", "--scaling", "weak,strong", "--dry-run",
    )  # fmt: skip
    assert shown.code == 0
    assert all(cell_id in shown.stdout for cell_id in study.cell_ids())
    (plan,) = study.plans()
    assert plan.command[:5] == ("matrix", "--workload", "mlp", "--batch-size", "32")
    assert f"asked by</dt><dd>bench {' '.join(plan.command)}<" in (study.root / "report.html").read_text()
    assert "torch.distributed.run --nproc-per-node=2 --standalone" in shown.stdout
    assert not (Path(study.root.parent) / "runs").exists()


def test_status_show_and_collect_tell_the_same_story(small_study, bench_in) -> None:
    study, _ = small_study
    bench, root = bench_in(study.root.parent), str(study.root)
    assert bench("status", root).code == 0
    ddp = next(cell_id for cell_id in study.cell_ids() if "ddp" in cell_id)
    assert "serial-simulation: 3 steps of 2 replicas" in bench("show", root, ddp[:12]).stdout
    index = (study.root / "index.jsonl").read_bytes()
    assert bench("collect", root).code == 0
    assert (study.root / "index.jsonl").read_bytes() == index


def _close(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


@pytest.mark.slow
def test_several_settings_are_run_beside_each_other_and_told_apart(bench, tmp_path) -> None:
    # A CPU without instructions for bfloat16 takes seconds for a step of a large batch.
    small = ("--gpus", "1", "--strategy", "single", "--batch-size", "4", "--repeats", "1")
    call = ("matrix", "--workload", "mlp", *small, *QUICK)
    settings = ("--precision", "fp32,bf16", "--seed", "0,1", "--out", "study")
    shown = bench(*call, *settings, "--dry-run")
    assert "fp32 and bf16, synthetic data" in shown.stdout
    assert "4 cells x 1 repeat; 0 points skipped; 4 of 4 runs to do" in shown.stdout
    # One launch: cells of several settings lie beside each other in time.
    assert shown.stdout.count("torch.distributed.run") == 1
    done = bench(*call, *settings)
    assert done.returncode == 0, done.stderr
    plans = Study(tmp_path / "study").plans()
    assert [(plan.request.precision, plan.request.seed) for plan in plans] == [
        *(("fp32", seed) for seed in (0, 1)),
        *(("bf16", seed) for seed in (0, 1)),
    ]
    assert [len(plan.cells) for plan in plans] == [1, 1, 1, 1]
    told = bench("export", "study", "--format", "markdown").stdout
    assert "precision=bf16, seed=1" in told
    again = bench(*call, *settings)
    assert "0 of 4 runs to do" in again.stderr
    assert len(Study(tmp_path / "study").plans()) == 4
