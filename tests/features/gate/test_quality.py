"""Tests of quality.py, which measures the error rates of the gate: its planted regressions and its report."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from packages import module_at

MS = 1_000_000


HERE = Path(__file__).parent
waiting_model, quality = module_at(HERE / "waiting_model.py"), module_at(HERE / "quality.py")
history_quality = module_at(HERE / "history_quality.py")


class SharedCore:
    """Clocks of a process on a core that others take in slices longer than a wait, and so only in steps."""

    cpu_ns = wall_ns = 0

    def step(self, cpu_ns: int) -> None:
        self.cpu_ns += cpu_ns
        self.wall_ns += 3 * cpu_ns

    def cpu(self) -> int:
        """A look at the CPU time, which takes 1 us of it."""
        self.cpu_ns += 1000
        self.wall_ns += 1000
        return self.cpu_ns

    def wall(self) -> int:
        self.cpu()
        return self.wall_ns


@pytest.mark.parametrize(("name", "share"), [("slow5", 0.05), ("slow10", 0.10)])
def test_a_planted_wait_is_its_share_of_the_step_however_much_others_take(name, share, monkeypatch) -> None:
    """A share of 5 % is 0.5 ms of a step of 10 ms of CPU time, not 1.5 ms of its 30 ms of wall time."""
    module = getattr(waiting_model, name)().module
    [hook] = module._forward_pre_hooks.values()
    core = SharedCore()
    monkeypatch.setattr(time, "process_time_ns", core.cpu)
    monkeypatch.setattr(time, "thread_time_ns", core.cpu)
    monkeypatch.setattr(time, "perf_counter_ns", core.wall)
    waits = []
    for _ in range(40):
        core.step(10 * MS)
        before = core.cpu_ns
        hook(module, ())
        waits.append(core.cpu_ns - before)
    assert waits[-1] == pytest.approx(share * 10 * MS, abs=0.01 * MS)


def call(seed: int, **fields: object) -> dict[str, object]:
    """A call of the same code as the ledger has it, whose pairs vary by 1.6 %."""
    rng = np.random.default_rng(seed)
    pair = {"quads": list(rng.normal(0, 0.03, 8)), "base_ns": 9e6, "new_ns": 9e6}
    return {
        "kind": "same",
        "commit": "0123456789abcdef",
        "machine": "Example, 2 cores, torch 2.13",
        "seconds": 60.0,
        "exit_code": 0,
        "verdicts": {"step_time": "unchanged", "peak_memory": "unchanged"},
        "logs": list(rng.normal(0, 0.016, 8)),
        "others": 0.1,
        "pairs": [pair] * 8,
        **fields,
    }


def test_the_report_counts_a_false_alarm_of_any_metric(tmp_path, capsys, monkeypatch) -> None:
    """One of three quiet calls has an alarm of the memory; a busy call does not count."""
    alarm = call(2, exit_code=1, verdicts={"step_time": "unchanged", "peak_memory": "regressed"})
    calls = [call(1), alarm, call(3), call(4, others=0.5)]
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("".join(json.dumps(one) + "\n" for one in calls))
    monkeypatch.setattr(quality, "DRAWN", 20)
    quality.report(ledger, 0.25)
    printed = capsys.readouterr().out
    assert "4 calls, 3 while" in printed
    assert "| same | 3 | 1 | 33.3%," in printed
    assert "24 pairs of 3 calls" in printed
    assert "| same, paired, 8 cells | 20 | 0 |" in printed


def test_unpaired_calls_are_drawn_from_one_machine() -> None:
    """Two machines of which one is twice as fast, each with steps that are always alike."""
    slow = [{"quads": [0.0], "base_ns": 18e6, "new_ns": 18e6}] * 8
    calls = [call(1), call(2, machine="Slow, 2 cores, torch 2.13", pairs=slow)]
    rng = np.random.default_rng(1)
    assert {quality.unpaired(rng, calls) for _ in range(50)} == {quality.Verdict.UNCHANGED}


def test_each_planted_edit_still_matches_the_source() -> None:
    edits = [kind.edit for kind in quality.KINDS.values() if kind.edit is not None]
    assert len(edits) == 2
    for file, place, _ in edits:
        assert (Path(__file__).parents[3] / file).read_text().count(place) == 1, file


@pytest.mark.slow
def test_the_odds_of_generated_histories_are_calibrated() -> None:
    """docs/evidence.md has 1,600 studies."""
    random, said = np.random.default_rng(7), []
    for _ in range(60):
        found, at = history_quality.history_with_step(random, "outliers", 2, 0.5)
        for one in found[:1]:
            first, last = int(one.range.before.commit), int(one.range.after.commit)
            said.append((one.range.odds, first < at <= last))
    stated, right = np.mean(said, axis=0)
    # Of about 50 changes at odds of 0.96, fewer than 44 right are seen in 1 of 200 such tests.
    assert len(said) > 40
    assert right > stated - 0.09
