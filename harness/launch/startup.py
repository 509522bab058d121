"""How a launch ended before its first cell began, and whether another launch would fare better."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.launch.ending import Signs, Stopped, inferred_outcome
from harness.launch.rank_output import rank_output
from harness.launch.starter import LogWords
from harness.machine.processes import exit_words
from results.launch import Launch, RankExit
from results.outcome import Outcome

_NO_RENDEZVOUS = re.compile(
    r"RendezvousTimeoutError|RendezvousConnectionError|DistNetworkError.*|EADDRINUSE|"
    r"client socket has timed out[^\n]*|address already in use",
    re.IGNORECASE,
)
_MACHINE = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:"
    r"\S*python\S*: (?:No module named|Error while finding module) .*|"
    r"guardian: cannot start .*|"
    r".*(?:No space left on device|Disk quota exceeded).*"
    r")$",
    re.MULTILINE,
)
"""What no other launch on this machine would end without, on whichever line."""
_MACHINE_AT_END = re.compile(r"(?:\[rank\d+\]: ?)?(?:\w+\.)*(?:ModuleNotFoundError|MachineError): .*")
"""The same, where it is the last that a process said: amid a log it may tell of an optional module."""


def startup_outcome(
    folder: Path,
    launch: Launch,
    exits: Sequence[RankExit],
    stopped: Stopped | None,
    signs: Signs,
    words: LogWords,
) -> tuple[Outcome, str]:
    """The outcome of a launch that ended before its first cell began, and its reason."""
    outcome, reason = inferred_outcome(exits, stopped, signs)
    killed = signs.killed_on_a_node is not None or (signs.exit_code or 0) < 0
    if stopped is None and not killed:
        away = scheduler_away(folder, words)
        fault, unmet = machine_fault(folder, launch, exits), no_rendezvous(folder, exits)
        if away is not None:
            outcome, reason = Outcome.NODE_FAILED, f"the scheduler did not answer: {away}"
        elif unmet is not None:
            # First, because the launch is then tried again: a machine's fault would end the campaign.
            outcome, reason = Outcome.MISSING_RANKS, f"the workers did not meet ({unmet})"
        elif fault is not None:
            # Not the cell's fault: it is run again when the machine is mended.
            outcome, reason = Outcome.CANCELLED, f"the machine is the cause: {fault}"
        elif outcome is Outcome.UNKNOWN and signs.exit_code is not None and signs.exit_code >= 0:
            outcome, reason = Outcome.CRASHED, _launcher_failed(folder, signs.exit_code)
    return outcome, f"before any cell began: {reason}"


def scheduler_away(folder: Path, words: LogWords) -> str | None:
    """How the scheduler failed to answer, in its own words; None if that is not why a launch ended."""
    return _said(folder, words.scheduler_away)


def allocation_over(folder: Path, words: LogWords) -> str | None:
    """How the scheduler refused a launch of a job that it has ended, in its own words; None if it did not."""
    return _said(folder, words.allocation_over)


def never_started(folder: Path, words: LogWords) -> str | None:
    """Why the scheduler has started no process of a launch; None if it has, or if that is not known."""
    if words.agent_logs is None or any(folder.glob(words.agent_logs)):
        return None
    return _said(folder, words.start_delayed) or "it has not said why"


def _said(folder: Path, words: re.Pattern[str] | None) -> str | None:
    if words is None:
        return None
    found = (words.search(_text(log)) for log in _logs(folder))
    return next((match["words"] for match in found if match is not None), None)


def machine_fault(folder: Path, launch: Launch, exits: Sequence[RankExit]) -> str | None:
    """Why no launch can start on this machine, in the words of a log; None if that is not certain."""
    if _killed(exits):
        return None
    found = (_MACHINE_AT_END.fullmatch(said) for said in _last_words(folder, launch, exits))
    at_end = next((match[0] for match in found if match is not None), None)
    return at_end or _first(_MACHINE, folder)


def _last_words(folder: Path, launch: Launch, exits: Sequence[RankExit]) -> Iterator[str]:
    """The last that each failed rank said, or, if torchrun names none, what started the ranks."""
    failed = [rank for rank in exits if rank.signal is None]
    if not failed:
        yield from (_last_line(log) for log in sorted(folder.glob("*.log")))
    yield from (rank.message for rank in failed if rank.message is not None)
    silent = {rank.rank for rank in failed if rank.message is None}
    for file in rank_output(folder, launch):
        # A rank that failed early has not said which file is its own.
        if silent and file.stream == "stderr" and (file.rank is None or file.rank in silent):
            yield _last_line(file.path)


def no_rendezvous(folder: Path, exits: Sequence[RankExit]) -> str | None:
    """How the nodes of a launch failed to meet, in torch's words; None if that is not why it ended."""
    # The others lose a rank that was killed, and say so in the same words.
    return None if _killed(exits) else _first(_NO_RENDEZVOUS, folder)


def log_end(folder: Path) -> str | None:
    """The last line that a launch has printed, with its file; None if it has printed nothing."""
    said = ((log, _last_line(log)) for log in _logs(folder))
    return next((f"{log}: {line}" for log, line in said if line), None)


def _launcher_failed(folder: Path, exit_code: int) -> str:
    said = log_end(folder)
    return f"its launcher {exit_words(exit_code)}, " + ("without a word" if said is None else f"see {said}")


def _killed(exits: Sequence[RankExit]) -> bool:
    return any(rank.signal not in (None, "SIGTERM") for rank in exits)


def _first(words: re.Pattern[str], folder: Path) -> str | None:
    found = (words.search(_text(log)) for log in _logs(folder))
    return next((match[0].strip() for match in found if match is not None), None)


def _logs(folder: Path) -> Iterator[Path]:
    """What the ranks have printed, and then torchruns and agents."""
    yield from sorted(folder.glob("torchrun/**/attempt_0/*/stderr.log"))
    yield from sorted(folder.glob("*.log"))


def _last_line(path: Path) -> str:
    """The last line that is not blank; empty if there is none."""
    return _text(path).rstrip().rpartition("\n")[2].strip()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
