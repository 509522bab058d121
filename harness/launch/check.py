"""`bench check`: start two ranks that try out a workload before anything is planned with it.

The ranks (`harness.worker.check`) build the workload, take steps and prove them, and write a report to a
file. This module starts them; it does not import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

from harness.machine.kernel import die_with_parent
from harness.machine.processes import exit_words, temporary_folder
from harness.worker.check_report import LONGEST_S, RANKS, CheckReport, CheckRequest
from results import files
from results.errors import MachineError
from results.parts import Unknown
from strategies.catalog import STRATEGIES
from workloads.catalog import MEMBERS, WORKLOADS, learn

LONGEST_COUNT_S = 120.0
"""Time limit of a check in which planning waits only for the parts of a model."""
LONGEST_LINE = 300
_REPORT = msgspec.json.Decoder(CheckReport)
"""Number of characters of a printed line that an error quotes."""


def check_request(
    workload: str,
    *,
    micro_batch: int | None,
    folder: Path,
    strategies: tuple[str, ...] | None = None,
    dataset: str | None = None,
) -> CheckRequest:
    """Return the request to check a workload by its text, with a plan's defaults for values that are not
    given.

    `strategies` None: all that run on several ranks, with an example of a value that must be given. Raises
    SpecError for a text that names no workload.
    """
    spec = WORKLOADS.parse(workload)
    member = MEMBERS[spec.name]
    if strategies is None:
        texts = [*_examples()]
    else:
        texts = [STRATEGIES.facts(text).spec.text for text in strategies]
    return CheckRequest(
        workload=spec.text,
        micro_batch=micro_batch or member.batch,
        optimizer=member.optimizer,
        dataset=dataset,
        source_folder=str(folder),
        strategies=tuple(texts),
    )


def _examples() -> Iterator[str]:
    """The text of each strategy that runs on several ranks here.

    The single-device strategy, one that a plan replaces by another, and engines that are missing or have
    another interpreter are left out.
    """
    for facts in STRATEGIES.all_facts:
        engine = facts.engine
        here = engine is None or (engine.python is None and engine.missing is None)
        if facts.distributed and hasattr(facts, "model") and here:
            value = facts.positional
            is_needed = value is not None and value.default is None
            yield f"{facts.name}:{value.example}" if value and is_needed else facts.name
            yield from facts.checked


def count_own_parts(workload: str, folder: Path) -> None:
    """Build a user's own model without memory in a separate process, and give the catalogue its parts, or why
    they are unknown."""
    request = check_request(workload, micro_batch=None, folder=folder, strategies=())
    try:
        found = check(msgspec.structs.replace(request, parts=True))
    except MachineError as error:
        learn(workload, Unknown(str(error)), splits=None)
    else:
        why = found.failure or found.absent.get("parts", "its check ended before they were counted")
        learn(workload, found.parts or Unknown(why), splits=found.splits, uncut=found.uncut)


def can_check() -> bool:
    """Return whether torch is installed."""
    return find_spec("torch") is not None


def check(request: CheckRequest) -> CheckReport:
    """Start the ranks and wait for their report. Raises MachineError if they end without one."""
    if not can_check():
        raise MachineError("a workload is checked where torch is installed: it is not in this environment")
    with temporary_folder("bench-check-") as (folder, held):
        (folder / "request.json").write_bytes(msgspec.json.encode(request))
        longest_s = LONGEST_COUNT_S if request.parts else LONGEST_S
        ranks = RANKS if request.strategies else 1
        code, printed = _run(folder, held=held, ranks=ranks, longest_s=longest_s)
        ended = f"took longer than {longest_s:g} s" if code is None else exit_words(code)
        ended += _last_line(printed)
        path = folder / "found.json"
        if not path.exists():
            raise MachineError(f"the check of {request.workload} ended without a result: it {ended}")
        found = files.read(path).parsed(_REPORT)
    if found.failure is not None or (code == 0 and (request.parts or found.step_s is not None)):
        return found
    # A report that ends early is not a result.
    return msgspec.structs.replace(found, failure=f"its check {ended}")


def _last_line(printed: str) -> str:
    lines = printed.strip().splitlines()
    return f"; the last line printed: {lines[-1][:LONGEST_LINE]}" if lines else ""


def _run(folder: Path, *, held: int, ranks: int, longest_s: float) -> tuple[int | None, str]:
    """Run the ranks until rank 0, which writes the report, has ended, or the time is over.

    All keep the descriptor `held` open. Returns rank 0's exit code (None: it took too long), and all output.
    """
    log, code = folder / "printed.log", None
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("wb") as output:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "harness.worker.check", str(folder)],
                env={**surroundings, "RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(held,),
                # The rank cannot do this itself in time: it imports torch for seconds, in which this process
                # may end.
                preexec_fn=die_with_parent,
            )
            for rank in range(ranks)
        ]
        try:
            with suppress(subprocess.TimeoutExpired):
                code = started[0].wait(longest_s)
        finally:
            for rank in started:
                rank.kill()
                rank.wait()
    return code, files.read_end(log).text
