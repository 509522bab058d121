"""How a launch ended: what torchrun said of its ranks, and what became of the runs without records."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from results.launch import RankExit
from results.outcome import Outcome

_FAILURE = re.compile(
    r"^\s*rank\s*:\s*(?P<rank>\d+) \(local_rank.*\n"
    r"\s*exitcode\s*:\s*(?P<code>-?\d+).*\n"
    r"\s*error_file: (?P<file>.+)$",
    re.MULTILINE,
)
_NO_RENDEZVOUS = re.compile(
    r"RendezvousTimeoutError|RendezvousConnectionError|DistNetworkError.*|EADDRINUSE|"
    r"client socket has timed out[^\n]*|address already in use",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Why the supervisor ended a launch."""

    outcome: Outcome
    reason: str


def rank_exits(logs: Sequence[Path]) -> tuple[RankExit, ...]:
    """The ranks that closing reports of torchruns name as failed, with the exception each left."""
    text = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    found = {int(match["rank"]): (int(match["code"]), match["file"]) for match in _FAILURE.finditer(text)}
    return tuple(
        RankExit(
            rank=rank,
            exit_code=code if code >= 0 else None,
            signal=_signal_name(-code) if code < 0 else None,
            message=_message(Path(file)),
        )
        for rank, (code, file) in sorted(found.items())
    )


def _message(path: Path) -> str | None:
    """The exception in the file that torchrun has a worker write; None if there is none."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError):
        # The worker was killed, perhaps while it wrote; its exit code says enough.
        return None
    text = message["message"] if isinstance(message, dict) else message
    return str(text)[:400]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def no_rendezvous(folder: Path) -> str | None:
    """How the nodes of a launch failed to meet, in torch's words; None if that is not why it ended."""
    for log in sorted(folder.glob("*.log")):
        match = _NO_RENDEZVOUS.search(log.read_text(encoding="utf-8", errors="replace"))
        if match is not None:
            return match[0]
    return None


def reading(exits: Sequence[RankExit], stopped: Stopped | None) -> tuple[Outcome, str]:
    """The outcome of a run that was going on when its launch ended and that left no complete records."""
    if stopped is not None:
        return stopped.outcome, stopped.reason
    # torchrun itself ends the other ranks with SIGTERM when one has failed.
    culprits = [rank for rank in exits if rank.signal != "SIGTERM"] or list(exits)
    killed = [rank for rank in culprits if rank.signal is not None]
    if killed:
        first = killed[0]
        hint = "; often the kernel's out-of-memory killer" if first.signal == "SIGKILL" else ""
        return Outcome.CRASHED, f"rank {first.rank} was killed by {first.signal}{hint}"
    if culprits:
        first = next((rank for rank in culprits if rank.message), culprits[0])
        return Outcome.CRASHED, f"rank {first.rank}: {first.message or f'exit code {first.exit_code}'}"
    return Outcome.UNKNOWN, "the launch ended without a word; see its logs"
