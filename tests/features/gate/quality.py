"""Measure the error rates of the gate, with real calls of `bench compare --ab`.

    python tests/features/gate/quality.py collect [LEDGER] [--minutes 60]
    python tests/features/gate/quality.py report [LEDGER] [--others-above 0.25]
    python tests/features/gate/quality.py simulate [--calls 300]

`collect` makes calls in a clone of HEAD and appends a line of JSON to LEDGER for each completed one, with its
pairs and the share of the cores that other processes took. LEDGER is by default `ledger.jsonl` in the folder
of this script. `report` prints the tables of docs/evidence.md from the calls during which others took at most
`--others-above` of the cores; it draws thousands of further calls from the recorded step times. `simulate`
prints how long a default call takes and what it finds, by the deviation of a quad in its pair.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from scipy.stats import beta

from harness.features.gate.effect import (
    ALPHA,
    FEWEST_PAIRS,
    FEWEST_QUADS,
    LOOKS,
    PAIRS_A_LOOK,
    SPOILED_ABOVE,
    Verdict,
    judge,
    paired_effect,
    quad_log,
    quads,
    relative_effect,
)
from harness.features.gate.paired.comparison import paired_samples, read_pairs
from harness.features.gate.paired.pair import BLOCK_S, ENOUGH, QUADS_S
from harness.features.gate.records.paired import Pair
from harness.machine.device import cpu_model
from harness.matrix import signals_are_ctrl_c
from results.store import utc_now

CELL = (
    "--gpus 2 --strategy scratch-ddp:bucket_mb=0.25:first_bucket_mb=0.25 --batch-size 512 --device cpu "
    "--oversubscribe --quads 0"
)
MARGIN = 0.05
JUDGED = 2
"""Timed metrics that share the error rate: step time and peak memory."""
PAIR, LAUNCH_S, OUTSIDE_S = 0.01, 12.0, 2.5
"""Simulated calls: the deviation between pairs that quads do not explain (measured from 756 pairs on a quiet
machine of two cores), the seconds of the launches, and the seconds of a pair outside of its quads."""
DRAWN = 5000
"""Calls that are drawn from recorded pairs."""
MANY = 8
"""Cells of the larger of the drawn calls."""
LEDGER = Path(__file__).with_name("ledger.jsonl")
DIGITS = 5
"""Decimal places of a stored logarithm: a thousandth of a percent."""
Call = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A regression that is planted in NEW, and the metric that must be called regressed."""

    metric: str
    target: int
    """Calls that are wanted."""
    workload: str = "plain"
    edit: tuple[str, str, str] | None = None
    """A file, a string that it contains once, and its replacement in NEW."""
    options: tuple[str, ...] = ()


KINDS = {
    "same": Kind(metric="step_time", target=150),
    "slow2": Kind(metric="step_time", target=20, workload="slow2"),
    "slow3": Kind(metric="step_time", target=20, workload="slow3"),
    "slow5": Kind(metric="step_time", target=60, workload="slow5"),
    "slow10": Kind(metric="step_time", target=20, workload="slow10"),
    "memory10": Kind(metric="peak_memory", target=20, workload="memory10"),
    "late": Kind(metric="setup", target=10, workload="late", options=("--fail-above", "setup=20%")),
    "overlap": Kind(
        metric="early_buckets",
        target=10,
        edit=(
            "strategies/scratch_ddp/reducer.py",
            '        """Called by a parameter\'s hook in the backward pass: its gradient is complete."""\n',
            "        return\n",
        ),
    ),
    "collective": Kind(
        metric="operations",
        target=10,
        edit=(
            "strategies/scratch_ddp/model.py",
            "        take_from_first(self._link, self._buffers.now())\n",
            "        take_from_first(self._link, self._buffers.now())\n"
            "        import torch\n\n"
            "        self._link.all_reduce(torch.zeros(16))\n",
        ),
    ),
}


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=quality", "-c", "user.email=quality@example.org")
    # So that the commit of an edit is the same in the next clone.
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-01T00:00:00Z")
    done = subprocess.run(
        ["git", *names, *words],
        cwd=folder,
        env={**os.environ, **dates},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@contextmanager
def cloned() -> Iterator[Path]:
    """Clone HEAD, with a branch for each edit."""
    source = git(Path(__file__).parent, "rev-parse", "--show-toplevel")
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        git(Path(folder), "clone", "--quiet", "--shared", source, str(clone))
        git(clone, "checkout", "--quiet", "-B", "plain")
        for name, kind in KINDS.items():
            if kind.edit is not None:
                file, place, replacement = kind.edit
                text = (clone / file).read_text()
                assert text.count(place) == 1, f"{file} must contain {place!r} once"
                git(clone, "checkout", "--quiet", "-B", name, "plain")
                (clone / file).write_text(text.replace(place, replacement))
                git(clone, "commit", "--quiet", "--all", "--message", name)
        git(clone, "checkout", "--quiet", "plain")
        yield clone


def collect(ledger: Path, minutes: float) -> None:
    """Make calls of the kind that is furthest behind its target, until the time is over or all are made."""
    end = time.monotonic() + 60 * minutes
    with cloned() as clone:
        commit = git(clone, "rev-parse", "plain")
        while time.monotonic() < end:
            done = Counter(call["kind"] for call in read(ledger))
            name = min(KINDS, key=lambda each: done[each] / KINDS[each].target)
            if done[name] >= KINDS[name].target:
                print("each kind has as many calls as it needs")
                break
            with tempfile.TemporaryDirectory() as folder:
                call = made(name, clone, Path(folder))
            with ledger.open("a") as file:
                file.write(json.dumps({"commit": commit, **call}) + "\n")
            verdict = call["verdicts"].get(KINDS[name].metric)
            print(f"{name}: {verdict}, {len(call['logs'])} pairs, others {call['others']:.0%}", flush=True)


def made(name: str, clone: Path, folder: Path) -> Call:
    """Make one call. Raises RuntimeError if it fails."""
    kind, began = KINDS[name], time.monotonic()
    out, found = folder / "ab", folder / "found.json"
    words = ["compare", "--ab", "plain", "plain" if kind.edit is None else name, *kind.options]
    words += ["--base-options", "--workload py:waiting_model:plain"]
    words += ["--new-options", f"--workload py:waiting_model:{kind.workload}"]
    words += ["--out", str(out), "--format", f"json={found}", "--", *CELL.split()]
    call = subprocess.Popen(
        [sys.executable, "-m", "harness.cli", *words],
        cwd=clone / "tests/features/gate",
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = call.communicate()
    finally:
        # When this process is interrupted, the call must not measure next to its successor.
        if call.poll() is None:
            call.send_signal(signal.SIGINT)
            call.communicate()
    if call.returncode not in (0, 1) or not found.exists():
        raise RuntimeError(f"{name}: {errors[-2000:]}")
    pairs = read_pairs(out)
    [sample] = paired_samples(out, pairs, SPOILED_ABOVE).values()
    blocks = [block for pair in pairs for cell in pair.cells for block in cell.blocks]
    shares = [block.foreign for block in blocks if block.foreign is not None]
    return {
        "at": utc_now(),
        "kind": name,
        "cell": CELL,
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": call.returncode,
        "verdicts": {each["metric"]: each["verdict"] for each in json.loads(found.read_text())["findings"]},
        "logs": [round(log, DIGITS) for log in sample.logs],
        "others": round(mean(shares) if shares else 0.0, 3),
        "pairs": [recorded(pair) for pair in pairs],
    }


def recorded(pair: Pair) -> Call:
    """Reduce a pair to its quads and to the step times that an unpaired comparison would use."""
    [cell] = pair.cells
    sides: dict[str, list[float]] = {"base": [], "new": []}
    for block in cell.blocks:
        sides[block.side].append(math.log(block.step_ns))
    return {
        "quads": [round(quad_log(quad), DIGITS) for quad in quads(cell, pair.alternation)],
        **{f"{side}_ns": round(math.exp(mean(logs))) if logs else None for side, logs in sides.items()},
    }


def read(ledger: Path) -> list[Call]:
    """Return the calls so far."""
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def report(ledger: Path, others_above: float) -> None:
    """Print the tables."""
    calls = read(ledger)
    kept = [call for call in calls if call["others"] <= others_above]
    print(f"{len(calls)} calls, {len(kept)} while others took at most {others_above:.0%} of the cores")
    machines = Counter(call["machine"] for call in kept)
    print(f"machines: {'; '.join(f'{name} ({number} calls)' for name, number in sorted(machines.items()))}")
    print(f"commits: {', '.join(sorted({call['commit'][:12] for call in kept}))}")
    print("\n| planted | calls | regressed | rate, 95 % bound | unchanged | inconclusive | pairs | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name, kind in KINDS.items():
        mine = [call for call in kept if call["kind"] == name]
        if mine:
            verdicts = [counted_verdict(call, kind.metric) for call in mine]
            pairs = f"{median(len(call['logs']) for call in mine):.0f}"
            seconds = f"{median(call['seconds'] for call in mine):.0f}"
            print(f"{row(name, verdicts, upper=name == 'same')} | {pairs} | {seconds} |")
    alike = [call for call in kept if call["kind"] == "same" and len(call["logs"]) >= FEWEST_PAIRS]
    if not alike:
        print("\nno call of the same code has enough pairs to draw from")
        return
    recorded = Recorded.of(alike)
    pairs_of_all = sum(len(call["logs"]) for call in alike)
    print(f"\n{recorded}")
    print(
        f"drawn from {pairs_of_all} pairs of {len(alike)} calls of the same code: the bounds below hold for "
        f"calls that vary as these pairs do"
    )
    print("\n| drawn | calls | regressed | rate, 95 % bound | unchanged | inconclusive |")
    print("|---|---|---|---|---|---|")
    rng = np.random.default_rng(1)
    print(row("same, paired", [drawn(rng, recorded, 0.0) for _ in range(DRAWN)], upper=True), "|")
    many = [drawn(rng, recorded, 0.0, cells=MANY) for _ in range(DRAWN)]
    print(row(f"same, paired, {MANY} cells", many, upper=True), "|")
    print(row("same, unpaired", [unpaired(rng, alike) for _ in range(DRAWN)], upper=True), "|")
    for percent in (2, 3, 5, 10):
        shift = math.log1p(percent / 100)
        print(
            row(f"+{percent} %, paired", [drawn(rng, recorded, shift) for _ in range(DRAWN)], upper=False),
            "|",
        )


def counted_verdict(call: Call, metric: str) -> str:
    """Return the verdict that counts: with the same code, a failure by any metric is a false alarm."""
    if call["kind"] == "same":
        return "regressed" if call["exit_code"] == 1 else str(call["verdicts"].get(metric, "none"))
    return str(call["verdicts"].get(metric, "none"))


def row(name: str, verdicts: Sequence[str], *, upper: bool) -> str:
    """Format a table row with the upper bound of a rate, or with its lower bound (Clopper-Pearson)."""
    count, calls = Counter(str(verdict) for verdict in verdicts), len(verdicts)
    hits = count["regressed"]
    if upper:
        bound = 1.0 if hits == calls else float(beta.ppf(0.95, hits + 1, calls - hits))
    else:
        bound = 0.0 if hits == 0 else float(beta.ppf(0.05, hits, calls - hits + 1))
    rate = f"{hits / calls:.1%}, {'<=' if upper else '>='} {bound:.1%}"
    quiet = count["unchanged"] + count["improved"]
    return f"| {name} | {calls} | {hits} | {rate} | {quiet} | {count['inconclusive']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The variation between pairs of calls of the same code."""

    quad: float
    """Deviation of a quad in its pair, the median over pairs."""
    rests: Sequence[float]
    """The difference of each pair from the mean of its call, scaled to the deviation from the true mean."""
    offsets: Sequence[float]
    """The shared offset of the pairs of each call, scaled down by what the rests add to a mean."""

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Recorded:
        logs = [np.array(call["logs"]) for call in calls]
        rests = [
            rest for each in logs for rest in (each - each.mean()) * math.sqrt(len(each) / (len(each) - 1))
        ]
        centres = np.array([each.mean() for each in logs])
        by_chance = np.mean(np.square(rests)) * np.mean([1 / len(each) for each in logs])
        shared = max(0.0, 1 - by_chance / max(np.mean(np.square(centres)), 1e-12))
        within = [stdev(pair["quads"]) for call in calls for pair in call["pairs"] if len(pair["quads"]) > 1]
        return cls(quad=median(within), rests=rests, offsets=list(centres * math.sqrt(shared)))

    def __str__(self) -> str:
        pairs, calls = (math.sqrt(np.mean(np.square(each))) for each in (self.rests, self.offsets))
        return (
            f"deviation of a quad {self.quad:.2%}, of a pair {pairs:.2%}, of what all pairs of a call share "
            f"{calls:.2%}"
        )


def drawn(rng: np.random.Generator, recorded: Recorded, shift: float, *, cells: int = 1) -> Verdict:
    """A call with the offset of one recorded call and the rests of any; `shift`: log(NEW / BASE).

    BASE and NEW of the same code may be exchanged, and with them the signs. A call of several cells looks on
    until each is judged, and says the worst.
    """
    shape = (cells, LOOKS * PAIRS_A_LOOK)
    signs = rng.choice([-1, 1], shape)
    offsets = rng.choice(recorded.offsets, (cells, 1)) * signs[:, :1]
    samples = offsets + rng.choice(recorded.rests, shape) * signs + shift
    found: set[Verdict] = set()
    for look in range(1, LOOKS + 1):
        effects = [paired_effect(s[: look * PAIRS_A_LOOK], ALPHA / LOOKS / JUDGED / cells) for s in samples]
        found = {judge(effect, MARGIN, paired=True) for effect in effects if effect is not None}
        if Verdict.INCONCLUSIVE not in found:
            break
    order = (Verdict.REGRESSED, Verdict.INCONCLUSIVE, Verdict.UNCHANGED, Verdict.IMPROVED)
    return next(change for change in order if change in found)


def unpaired(rng: np.random.Generator, calls: Sequence[Call], runs: int = 5) -> Verdict:
    """An unpaired comparison of runs of two recorded calls, as if one had been measured before the other.

    Both are of machines with the same CPU model, cores and torch; whether of one machine is not recorded.
    """
    machine = calls[rng.integers(len(calls))]["machine"]
    calls = [call for call in calls if call["machine"] == machine]
    sides = []
    for at in rng.integers(len(calls), size=2):
        times = [
            pair[f"{side}_ns"] for pair in calls[at]["pairs"] for side in ("base", "new") if pair["quads"]
        ]
        sides.append(rng.choice(times, runs))
    effect = relative_effect(sides[0], sides[1], ALPHA / JUDGED)
    assert effect is not None
    return judge(effect, MARGIN)


def simulate(calls: int) -> None:
    """Print the seconds, the pairs and the verdicts of simulated calls, by the deviation of a quad."""
    print(
        "| deviation of a quad | same code: regressed | inconclusive | pairs | seconds "
        "| +5 %: regressed | pairs | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rng = np.random.default_rng(1)
    for quad in (0.01, 0.045, 0.07, 0.1, 0.15, 0.2):
        row = f"| {100 * quad:g} % "
        for shift in (0.0, math.log1p(0.05)):
            made = [_simulated(rng, quad, shift) for _ in range(calls)]
            found = Counter(change for change, _, _ in made)
            row += f"| {found[Verdict.REGRESSED] / calls:.1%} "
            row += "" if shift else f"| {found[Verdict.INCONCLUSIVE] / calls:.1%} "
            row += f"| {mean(pairs for _, pairs, _ in made):.1f} | {mean(s for *_, s in made):.0f} "
        print(f"{row}|")


def _simulated(rng: np.random.Generator, quad: float, shift: float) -> tuple[Verdict, int, float]:
    """Simulate one call; return its verdict, the number of its pairs, and its seconds."""
    logs: list[float] = []
    change, seconds = Verdict.INCONCLUSIVE, LAUNCH_S
    most = int(QUADS_S / (4 * BLOCK_S))
    while change is Verdict.INCONCLUSIVE and len(logs) < LOOKS * PAIRS_A_LOOK:
        for _ in range(PAIRS_A_LOOK):
            values = rng.normal(rng.normal(shift, PAIR), quad, most)
            # As `harness.features.gate.paired.pair` ends a pair.
            taken = next(
                n
                for n in range(FEWEST_QUADS, most + 1)
                if n == most or values[:n].std(ddof=1) / math.sqrt(n) < ENOUGH
            )
            logs.append(float(values[:taken].mean()))
            seconds += OUTSIDE_S + 4 * BLOCK_S * taken
        effect = paired_effect(logs, ALPHA / LOOKS / JUDGED)
        assert effect is not None
        change = judge(effect, MARGIN, paired=True)
    return change, len(logs), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    collecting, reporting = commands.add_parser("collect"), commands.add_parser("report")
    for each in (collecting, reporting):
        each.add_argument("ledger", type=Path, nargs="?", default=LEDGER)
    collecting.add_argument("--minutes", type=float, default=60)
    reporting.add_argument("--others-above", type=float, default=0.25, help="a share of the cores")
    commands.add_parser("simulate").add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    if given.command == "collect":
        with signals_are_ctrl_c():
            collect(given.ledger, given.minutes)
    elif given.command == "report":
        report(given.ledger, given.others_above)
    else:
        simulate(given.calls)


if __name__ == "__main__":
    main()
