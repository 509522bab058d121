"""How often the gate errs, by real calls of `bench compare --ab` on the same code and on planted regressions.

    python tests/reports/gate/quality.py collect [LEDGER] [--minutes 60] [--kinds same,slow5] [--any-load]
    python tests/reports/gate/quality.py report [LEDGER] [--others-above 0.25]
    python tests/reports/gate/quality.py cost [--rounds 6]
    python tests/reports/gate/quality.py simulate [--calls 300] [--pairs-a-look 6] [--quads-s 8]

`collect` makes calls and appends a line of JSON to LEDGER for each one that came to its end, with its pairs
and the share of the cores that others took. LEDGER is `ledger.jsonl` beside this script unless another is
named. After `--minutes` it interrupts the call that is
under way, whose pairs stay beside LEDGER in a folder that ends with `.going`: the next `collect` of the same
commit continues it, with new launches. Otherwise it goes on with the kind that is furthest behind its target,
until each has its calls.
All calls are the default, on a clone of HEAD; with `--any-load` no quad is left out because of others.
`report` prints the tables of docs/gate.md, of the calls while others took at most `--others-above` of the
cores; thousands of further calls are drawn from the recorded pairs, of step times alone. `cost` times pairs
that are forked and pairs that are launched, in turns. `simulate` says what a default call takes and finds, by
the deviation of a quad in its pair.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from scipy.stats import beta

from harness.gate.paired.comparison import paired_samples, read_pairs
from harness.gate.paired.pair import BLOCK_S, ENOUGH, QUADS_S, PairContext, Pairs
from harness.gate.paired.sources import Repository, Source
from harness.machine.device import cpu_model
from harness.machine.processes import temporary_folder
from harness.matrix import signals_are_ctrl_c
from reports.gate.effect import (
    ALPHA,
    FEWEST_PAIRS,
    FEWEST_QUADS,
    LOOKS,
    PAIRS_A_LOOK,
    SPOILED_ABOVE,
    Verdict,
    judge,
    judge_pairs,
    paired_effect,
    quad_log,
    quads,
    relative_effect,
)
from results.paired import Pair, Side
from results.store import utc_now

CELL = (
    "--gpus 2 --strategy scratch-ddp:bucket_mb=0.25:first_bucket_mb=0.25 --batch-size 512 --device cpu "
    "--oversubscribe --quads 0"
)
CANARY = (
    "--workload gpt-nano --gpus 2 --strategy scratch-ddp:bucket_mb=1 --batch-size 2 --device cpu "
    "--oversubscribe --quads 0"
)
MARGIN = 0.05
JUDGED = 2
"""Timed metrics that share the error rate: step time and peak memory."""
PAIR, LAUNCH_S, BESIDE_S = 0.01, 12.0, 2.5
"""Of simulated calls: the deviation between pairs that quads do not explain, as 756 pairs on a quiet machine
of two cores had it; seconds of the launches; and of a pair beside its quads."""
DRAWN = 5000
"""Calls that are drawn from recorded pairs."""
MANY = 8
"""Cells of the larger of the drawn calls."""
LEDGER = Path(__file__).with_name("ledger.jsonl")
DIGITS = 5
"""Of a kept logarithm: a thousandth of a percent."""
Call = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is planted in NEW, and what must be called regressed."""

    metric: str
    target: int
    """Calls that are wanted."""
    workload: str = "plain"
    edit: tuple[str, str, str] | None = None
    """A file, what stands in it once, and what stands there in NEW."""
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
    """A clone of HEAD with a branch for each edit."""
    source = git(Path(__file__).parent, "rev-parse", "--show-toplevel")
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        git(Path(folder), "clone", "--quiet", "--shared", source, str(clone))
        git(clone, "checkout", "--quiet", "-B", "plain")
        for name, kind in KINDS.items():
            if kind.edit is not None:
                file, place, becomes = kind.edit
                text = (clone / file).read_text()
                assert text.count(place) == 1, f"{place!r} must stand once in {file}"
                git(clone, "checkout", "--quiet", "-B", name, "plain")
                (clone / file).write_text(text.replace(place, becomes))
                git(clone, "commit", "--quiet", "--all", "--message", name)
        git(clone, "checkout", "--quiet", "plain")
        yield clone


def collect(ledger: Path, names: Sequence[str], minutes: float, *, any_load: bool) -> None:
    """Make calls until the time is over."""
    end = time.monotonic() + 60 * minutes
    if ledger.exists() and ledger.stat().st_size and not ledger.read_bytes().endswith(b"\n"):
        # The last line was cut off: the next one must not continue it.
        with ledger.open("a") as file:
            file.write("\n")
    with cloned() as clone:
        commit = git(clone, "rev-parse", "plain")
        going = ledger.with_suffix(".going") / commit
        for other in going.parent.glob("*"):
            if other != going:
                shutil.rmtree(other)
        while time.monotonic() < end:
            done = Counter(call["kind"] for call in read(ledger))
            wanted = [each for each in names if done[each] < KINDS[each].target]
            behind = min(wanted, key=lambda each: done[each] / KINDS[each].target, default=None)
            name = next((path.name for path in going.glob("*")), behind)
            if name is None:
                print("each kind has the calls that are wanted")
                break
            line = made(name, clone, commit, going / name, end, any_load=any_load)
            if line is None:
                print(f"{name}: interrupted, {len(read_pairs(going / name / 'ab'))} pairs so far")
                break
            with ledger.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shown = line["verdicts"].get(KINDS[name].metric)
            shutil.rmtree(going / name)
            print(f"{name}: {shown}, {len(line['logs'])} pairs, others {line['others']:.0%}", flush=True)


def made(name: str, clone: Path, commit: str, folder: Path, end: float, *, any_load: bool) -> Call | None:
    """One call, kept in `folder` until it is over; None if it was interrupted because the time was.

    Raises RuntimeError if it fails.
    """
    kind, began, load = KINDS[name], time.monotonic(), os.getloadavg()[0]
    continued = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    out, found = folder / "ab", folder / "found.json"
    found.unlink(missing_ok=True)
    words = ["compare", "--ab", "plain", "plain" if kind.edit is None else name, *kind.options]
    words += ["--base-options", "--workload py:waiting_model:plain"]
    words += ["--new-options", f"--workload py:waiting_model:{kind.workload}"]
    above = 1.0 if any_load else SPOILED_ABOVE
    words += ["--others-above", f"{above:.0%}", "--out", str(out.resolve())]
    words += ["--format", f"json={found.resolve()}", "--", *CELL.split()]
    call = subprocess.Popen(
        [sys.executable, "-m", "harness.cli", *words],
        cwd=clone / "tests/reports/gate",
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, told = call.communicate(timeout=max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also where this process is told to end: its call must not measure on beside the next one.
        if call.poll() is None:
            call.send_signal(signal.SIGINT)
            call.communicate()
    if call.returncode not in (0, 1) or not found.exists():
        raise RuntimeError(f"{name}: {told[-2000:]}")
    pairs = read_pairs(out)
    [sample] = paired_samples(out, pairs, above).values()
    return {
        "at": utc_now(),
        "kind": name,
        "cell": CELL,
        "commit": commit,
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seconds": None if continued else round(time.monotonic() - began, 1),
        "load_before": round(load, 1),
        "others_above": above,
        "exit_code": call.returncode,
        "verdicts": {each["metric"]: each["verdict"] for each in json.loads(found.read_text())["findings"]},
        "logs": [round(log, DIGITS) for log in sample.logs],
        "spoiled": sample.spoiled,
        "others": round(sample.foreign or 0.0, 3),
        "forked": sample.forked,
        "pairs": [recorded(pair) for pair in pairs],
    }


def recorded(pair: Pair) -> Call:
    """What is kept of a pair: its quads, and the step times that an unpaired comparison would have had."""
    [cell] = pair.cells
    sides: dict[str, list[float]] = {"base": [], "new": []}
    for block in cell.blocks:
        sides[block.side].append(math.log(block.step_ns))
    return {
        "quads": [round(quad_log(quad), DIGITS) for quad in quads(cell, pair.alternation)],
        "others": round(mean(block.foreign or 0.0 for block in cell.blocks), 3) if cell.blocks else None,
        "blocks_s": round(sum(block.ns for block in cell.blocks) / 1e9, 2),
        **{f"{side}_ns": round(math.exp(mean(logs))) if logs else None for side, logs in sides.items()},
    }


def read(ledger: Path) -> list[Call]:
    """The calls so far; a last line that was cut off is left out."""
    calls = []
    for line in ledger.read_text().splitlines() if ledger.exists() else []:
        try:
            calls.append(json.loads(line))
        except ValueError:
            print(f"a torn line of {ledger} is left out", file=sys.stderr)
    return calls


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
            verdicts = [told(call, kind.metric) for call in mine]
            pairs = f"{median(len(call['logs']) for call in mine):.0f}"
            whole = [call["seconds"] for call in mine if call["seconds"] is not None]
            seconds = f"{median(whole):.0f}" if whole else "-"
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


def told(call: Call, metric: str) -> str:
    """The verdict that counts: of the same code any that fails is a false alarm, whatever its metric."""
    if call["kind"] == "same":
        return "regressed" if call["exit_code"] == 1 else str(call["verdicts"].get(metric, "none"))
    return str(call["verdicts"].get(metric, "none"))


def row(name: str, verdicts: Sequence[str], *, upper: bool) -> str:
    """Of false alarms the upper bound, of what is to be found the lower one (Clopper-Pearson)."""
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
    """What the pairs of calls of the same code vary by."""

    quad: float
    """Deviation of a quad in its pair, the median over pairs."""
    rests: Sequence[float]
    """What each pair differs by from the mean of its call; scaled to the deviation from the true mean."""
    offsets: Sequence[float]
    """What all pairs of a call share, of each call; scaled down by what the rests alone bring into a mean."""

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
        found = {judge_pairs(effect, MARGIN) for effect in effects if effect is not None}
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


def cost(rounds: int) -> None:
    """Time pairs of the canary's cell, forked and launched in turns; prints seconds and ratios."""
    took: dict[str, list[float]] = {"forked": [], "launched": []}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, temporary_folder("bench-ab-") as (temporary, held):
        source = Repository(Path(__file__).parent).source("NEW", ".", None, temporary)
        source = replace(source, options=tuple(CANARY.split()))
        sides: dict[Side, Source] = {"base": source, "new": source}

        def context(name: str, repeats: int) -> PairContext:
            (temporary / name).mkdir()
            return PairContext(
                sides=sides,
                folder=Path(folder) / name,
                temporary=temporary / name,
                held=held,
                spoiled_above=1.0,
                repeats=repeats,
            )

        forked, launched = Pairs(context("forked", rounds + 2)), Pairs(context("launched", 1))
        with closing(forked), closing(launched):
            began = time.monotonic()
            forked.run(1, "blocks")
            print(f"first pair, with its launches: {time.monotonic() - began:.1f} s", flush=True)
            for number in range(2, rounds + 2):
                order = ("forked", "launched") if number % 2 else ("launched", "forked")
                for name in order:
                    began = time.monotonic()
                    pair = (forked if name == "forked" else launched).run(number, "blocks")
                    if name == "launched":
                        launched.close()
                    took[name].append(time.monotonic() - began)
                    assert pair.forked == (name == "forked")
                print(f"{took['forked'][-1]:.1f} s forked, {took['launched'][-1]:.1f} s launched", flush=True)
    ratios = [one / other for one, other in zip(took["launched"], took["forked"], strict=True)]
    print(f"{utc_now()}, {cpu_model()}, {os.cpu_count()} cores, load {load:.1f} before")
    for name, seconds in took.items():
        print(f"{name}: median {median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f}")
    print(f"ratio: median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


def simulate(calls: int, pairs_a_look: int, quads_s: float) -> None:
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
            made = [_simulated(rng, quad, shift, pairs_a_look, quads_s) for _ in range(calls)]
            found = Counter(change for change, _, _ in made)
            row += f"| {found[Verdict.REGRESSED] / calls:.1%} "
            row += "" if shift else f"| {found[Verdict.INCONCLUSIVE] / calls:.1%} "
            row += f"| {mean(pairs for _, pairs, _ in made):.1f} | {mean(s for *_, s in made):.0f} "
        print(f"{row}|")


def _simulated(
    rng: np.random.Generator, quad: float, shift: float, pairs_a_look: int, quads_s: float
) -> tuple[Verdict, int, float]:
    """One call: what it says, its pairs, and its seconds."""
    logs: list[float] = []
    change, seconds = Verdict.INCONCLUSIVE, LAUNCH_S
    most = int(quads_s / (4 * BLOCK_S))
    while change is Verdict.INCONCLUSIVE and len(logs) < LOOKS * pairs_a_look:
        for _ in range(pairs_a_look):
            values = rng.normal(rng.normal(shift, PAIR), quad, most)
            # As `harness.gate.paired.pair` ends a pair.
            taken = next(
                n
                for n in range(FEWEST_QUADS, most + 1)
                if n == most or values[:n].std(ddof=1) / math.sqrt(n) < ENOUGH
            )
            logs.append(float(values[:taken].mean()))
            seconds += BESIDE_S + 4 * BLOCK_S * taken
        effect = paired_effect(logs, ALPHA / LOOKS / JUDGED)
        assert effect is not None
        change = judge_pairs(effect, MARGIN)
    return change, len(logs), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("ledger", type=Path, nargs="?", default=LEDGER)
    collecting.add_argument("--minutes", type=float, default=60)
    collecting.add_argument("--kinds", default=",".join(KINDS))
    collecting.add_argument("--any-load", action="store_true", help="no quad is left out because of others")
    reporting = commands.add_parser("report")
    reporting.add_argument("ledger", type=Path, nargs="?", default=LEDGER)
    reporting.add_argument("--others-above", type=float, default=0.25, help="a share of the cores")
    commands.add_parser("cost").add_argument("--rounds", type=int, default=6)
    simulating = commands.add_parser("simulate")
    simulating.add_argument("--calls", type=int, default=300)
    simulating.add_argument("--pairs-a-look", type=int, default=PAIRS_A_LOOK)
    simulating.add_argument("--quads-s", type=float, default=QUADS_S, help="most seconds of a pair's quads")
    given = parser.parse_args()
    if given.command == "collect":
        with signals_are_ctrl_c():
            collect(given.ledger, given.kinds.split(","), given.minutes, any_load=given.any_load)
    elif given.command == "report":
        report(given.ledger, given.others_above)
    elif given.command == "simulate":
        simulate(given.calls, given.pairs_a_look, given.quads_s)
    else:
        cost(given.rounds)


if __name__ == "__main__":
    main()
