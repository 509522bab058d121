"""How a launch ended: what its processes left in logs and notes, and the ending that follows for its runs.

`look_back` reads what was seen: torchrun's closing reports, messages of schedulers, kills of the kernel,
notes of nodes that left. `judged` infers an `Ending` from it by rules in order, for runs that lack rank
records and for a launch that ended before its first cell began.

Torchrun's reports are read from its log. Its error files lack the exit code and the signal of a rank that
was killed, and the logs of launches by earlier versions have to be read in any case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from harness.launch.rank_output import rank_output
from harness.launch.starter import LogWords
from harness.machine.device import control_groups, read_fact
from harness.machine.processes import exit_words, signal_name
from results import files
from results.errors import StoreError
from results.foreign_text import shortened
from results.launch import Launch, RankExit, rank_log_paths, rank_output_paths
from results.outcome import Ending, Outcome

_ERROR_FILE = msgspec.json.Decoder(dict[str, Any])
_FAILURE = re.compile(
    r"^\s*rank\s*:\s*(?P<rank>\d+) \(local_rank.*\n"
    r"\s*exitcode\s*:\s*(?P<code>-?\d+).*\n"
    r"\s*error_file: (?P<file>.+)$",
    re.MULTILINE,
)
_ASKED_TO_END = re.compile(r"SignalException: Process \d+ got signal: (?:1|2|15)$", re.MULTILINE)
"""Torchrun prints this when a signal has asked it to end its ranks."""
_TORCHRUN_KILLED = re.compile(r"^torchrun was killed by (?P<signal>\S+)$", re.MULTILINE)
"""`print_torchrun_killed` prints this."""
_KILLS_ON_HOST = re.compile(r"out-of-memory kills on this host: (?P<kills>\d+)")
"""`print_kills` prints this."""
_KERNEL_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_RAISED = re.compile(r'\w+Error: [^"\n]*')
"""The pattern matches an exception in a rank's log or stderr."""
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
"""A fault of the machine, on any line: each launch on this machine would end with it."""
_MACHINE_AT_END = re.compile(r"(?:\[rank\d+\]: ?)?(?:\w+\.)*(?:ModuleNotFoundError|MachineError): .*")
"""The same, but only as the last line of a process: amid a log it may be about an optional module."""


def rank_exits(folder: Path) -> tuple[RankExit, ...]:
    """The ranks that the closing reports of torchruns name as failed, with the exception each left."""
    text = _all_logs(folder)
    found = {int(match["rank"]): (int(match["code"]), match["file"]) for match in _FAILURE.finditer(text)}
    return tuple(
        RankExit(
            rank=rank,
            exit_code=code if code >= 0 else None,
            signal=signal_name(-code) if code < 0 else None,
            message=_message(Path(file)),
        )
        for rank, (code, file) in sorted(found.items())
    )


def _message(path: Path) -> str | None:
    """The exception in the error file that a worker writes for torchrun; None without one."""
    try:
        message = files.read(path).parsed(_ERROR_FILE)["message"]
    except (OSError, files.DamagedError, KeyError):
        # The worker was killed, perhaps while it wrote; its exit code says enough.
        return None
    text = message.get("message", "") if isinstance(message, dict) else message
    return shortened(" ".join(str(text).split()))


def asked_to_end(folder: Path, *, nodes: int) -> bool:
    """Whether the torchruns of all nodes printed that a signal asked them to end."""
    # Each says it once for every handler that the signal has interrupted.
    said = {(log, words) for log in _logs(folder) for words in _ASKED_TO_END.findall(_text(log))}
    return len(said) >= nodes


def print_torchrun_killed(number: int) -> None:
    """Print, for the log of a launch, that signal `number` killed this node's torchrun.

    An agent does so, because srun passes on only the largest exit code of all nodes; `killed_on_a_node`
    reads it.
    """
    print(f"torchrun was killed by {signal_name(number)}", flush=True)


def killed_on_a_node(folder: Path, patterns: LogWords) -> tuple[str, str] | None:
    """Who was killed on one node of several, and by which signal, as its agent or the scheduler says."""
    torchrun = _TORCHRUN_KILLED.search(_all_logs(folder))
    if torchrun is not None:
        return "a node's torchrun", torchrun["signal"]
    agent = scheduler_said(folder, patterns.agent_killed)
    return None if agent is None else (f"the agent of {agent['node']}", "SIGKILL")


def scheduler_said(folder: Path, pattern: re.Pattern[str] | None) -> re.Match[str] | None:
    """The first message of a scheduler in the logs of a launch that a pattern of its `LogWords` matches."""
    found = [] if pattern is None else [pattern.search(_text(log)) for log in _logs(folder)]
    return next((match for match in found if match is not None), None)


def never_started(folder: Path, patterns: LogWords) -> bool:
    """Whether the scheduler has started no process of a launch; False if that is not known."""
    return patterns.agent_logs is not None and not any(folder.glob(patterns.agent_logs))


def out_of_memory_kills(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Out-of-memory kills in this process's control group, or, if it has no such counter, on the host.

    They are counted since the group was made, or since the host started: use the difference over a launch.
    None if the kernel has no such counter. Sources: cgroup-v2.rst, memory.events (with the groups below);
    cgroup-v1/memory.rst, memory.oom_control (this group only); /proc/vmstat.
    """
    groups = control_groups("memory", proc, cgroups)
    counters = (folder / ("memory.oom_control", "memory.events")[version - 1] for folder, version in groups)
    for path in (*counters, proc / "vmstat"):
        found = _KERNEL_KILLS.search(read_fact(path) or "")
        if found is not None:
            return int(found[1])
    return None


def print_kills(kills: int) -> None:
    """Print the out-of-memory kills of this host, if there were any; `printed_kills` reads it from a log."""
    if kills:
        print(f"out-of-memory kills on this host: {kills}", flush=True)


def printed_kills(folder: Path, scheduler: re.Pattern[str] | None = None) -> int | None:
    """The sum of the kills that agents print in the logs of a launch; None if none is printed.

    `scheduler` matches a scheduler's own message about such kills, with the group `kills` (`LogWords`).
    """
    text, ways = _all_logs(folder), [_KILLS_ON_HOST, *([] if scheduler is None else [scheduler])]
    found = [int(match["kills"]) for way in ways for match in way.finditer(text)]
    return sum(found) if found else None


def write_left(folder: Path, node_rank: int, why: str) -> None:
    """Write the note, for the launch's supervisor, that node `node_rank` has left, and `why`, a clause.

    A rank that waits in a collective for the ranks of such a node may wait until its time-out: not every
    transport reports that a peer has gone (NCCL over InfiniBand does not, Gloo mostly does). The first note
    of a node stays. If the note cannot be written, the other ranks only wait longer.
    """
    with suppress(StoreError):
        files.write_once(folder / f"left-{node_rank}.txt", f"{why}\n".encode())


def who_left(folder: Path) -> str | None:
    """The nodes of a launch that have left, each with its reason; None if all are there."""
    notes = {int(path.stem.removeprefix("left-")): path for path in folder.glob("left-*.txt")}
    said = []
    for node, path in sorted(notes.items()):
        with suppress(OSError):
            said.append(f"node {node}: {files.read(path).text.strip()}")
    return "; ".join(said) or None


def unless_disk_full(folder: Path, ending: Ending) -> Ending:
    """The ending of runs that lack records: the ending of the launch in `folder`, or a full disk.

    A full disk on which a rank failed is the reason why no process recorded what happened.
    """
    if ending.outcome not in (Outcome.CRASHED, Outcome.MISSING_RANKS, Outcome.UNKNOWN):
        return ending
    for log in [*rank_log_paths(folder).values(), *rank_output_paths(folder)]:
        # The last one: a rank may have continued after an earlier one.
        last = _RAISED.findall(_text(log))[-1:]
        if last and _DISK_FULL.search(last[0]):
            return Ending(Outcome.CANCELLED, f"the disk is full: {shortened(last[0])}")
    return ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The signs of how a launch has ended."""

    started: tuple[str, ...] = ()
    """Ids of the runs that began, in order."""
    stopped: Ending | None = None
    """Why the supervisor ended it; None: it ended by itself, or because a node left."""
    exits: tuple[RankExit, ...] = ()
    """The ranks that torchrun reported as failed."""
    exit_code: int | None = None
    """The exit code of the process that was started, negative for a signal. None: the supervisor ended it."""
    asked_to_end: bool = False
    """Whether its torchruns printed that a signal asked them to end."""
    killed_on_a_node: tuple[str, str] | None = None
    """Who was killed on one node of several, and by which signal, if that is known."""
    left: str | None = None
    """The nodes whose notes say that they have left, and why."""
    recorded: frozenset[int] = frozenset()
    """Ranks that have recorded how the run ended for them: their exits add nothing."""
    ended_early: frozenset[int] = frozenset()
    """Ranks that ended with exit code 0 during the run and left no record."""
    out_of_memory_kills: int | None = None
    """Processes that kernels ended because memory ran out during the launch; None: not known."""
    away: str | None = None
    """How the scheduler did not answer. This field and the next ones are set only if no run began and the
    supervisor did not stop the launch."""
    unmet: str | None = None
    """How the nodes failed to meet."""
    fault: str | None = None
    """The line of a log that says why no launch can start on this machine."""
    last_line: str | None = None
    """The last line that the launch has printed, with its file."""

    @property
    def killed_by(self) -> str | None:
        """The signal that killed the process that was started."""
        return None if self.exit_code is None or self.exit_code >= 0 else signal_name(-self.exit_code)


def look_back(folder: Path, launch: Launch, words: LogWords, known: Seen) -> Seen:
    """Add what a launch that has ended left in its folder to what its supervisor has `known` itself.

    `known` has the kills on this host, to which the kills that agents print of other hosts are added.
    """
    exits, printed = rank_exits(folder), printed_kills(folder, words.out_of_memory)
    counts = [count for count in (known.out_of_memory_kills, printed) if count is not None]
    seen = replace(
        known,
        exits=exits,
        asked_to_end=asked_to_end(folder, nodes=launch.placement.nodes),
        killed_on_a_node=killed_on_a_node(folder, words),
        left=who_left(folder),
        ended_early=_ended_early(launch, exits, known) if known.started else frozenset(),
        out_of_memory_kills=sum(counts) if counts else None,
    )
    if seen.started or seen.stopped is not None:
        return seen
    away = scheduler_said(folder, words.scheduler_away)
    return replace(
        seen,
        away=None if away is None else away["words"],
        # The others lose a rank that was killed, and say so in the same words.
        unmet=None if _killed(exits) else _first_match(_NO_RENDEZVOUS, folder),
        fault=None if _killed(exits) else machine_fault(folder, launch, exits),
        last_line=next(
            (f"{log}: {line}" for log in _ranks_and_logs(folder) if (line := _last_line(log))), None
        ),
    )


def _ended_early(launch: Launch, exits: Sequence[RankExit], known: Seen) -> frozenset[int]:
    """Ranks that ended without a record of the last run, and without a failure that torchrun reports.

    They are known only if all torchruns ended without an error, or if there is one torchrun and it has
    reported the ranks that failed. Otherwise the set is empty.
    """
    reported = bool(exits) and launch.placement.nodes == 1
    if known.exit_code != 0 and (known.exit_code is None or known.exit_code < 0 or not reported):
        return frozenset()
    return frozenset(range(launch.placement.gpus)) - {rank.rank for rank in exits} - known.recorded


def judged(seen: Seen) -> Ending:
    """The ending of the runs that a launch leaves without all rank records, or of a launch in which none
    began.

    The first cause that is found decides. An end without one is `unknown`, with advice to read the logs.
    """
    cause = seen.stopped or _before_the_program(seen) or _of_ranks(seen) or _of_nodes(seen)
    ending = cause or _unsaid(seen)
    return ending if seen.started else Ending(ending.outcome, f"before any cell began: {ending.reason}")


def _before_the_program(seen: Seen) -> Ending | None:
    """The scheduler, the network or the machine kept the first cell from its start: not the cell's fault."""
    if seen.killed_on_a_node is not None or seen.killed_by is not None:
        return None
    if seen.away is not None:
        return Ending(Outcome.NODE_FAILED, f"the scheduler did not answer: {seen.away}")
    if seen.unmet is not None:
        # Checked first: this launch is tried again, and a fault of the machine would end the campaign.
        return Ending(Outcome.MISSING_RANKS, f"the workers did not meet ({seen.unmet})")
    if seen.fault is not None:
        # The cell is run again when the machine is repaired.
        return Ending(Outcome.CANCELLED, f"the machine is the cause: {seen.fault}")
    return None


def _of_ranks(seen: Seen) -> Ending | None:
    """A rank ended early (the others fail because it is gone), was killed, or failed."""
    if early := seen.ended_early:
        who = f"rank {min(early)}" if len(early) == 1 else f"{len(early)} ranks"
        return Ending(
            Outcome.CRASHED,
            f"{who} ended with exit code 0 before the run was over: the program must return, and not end its "
            f"process (os._exit)",
        )
    if killed := _killed(seen.exits):
        # The kernel ends a process by SIGKILL when memory runs out.
        first = max(killed, key=lambda rank: bool(seen.out_of_memory_kills) and rank.signal == "SIGKILL")
        return _kill(f"rank {first.rank}", str(first.signal), seen, Outcome.CRASHED)
    failed = [rank for rank in seen.exits if rank.signal is None and rank.rank not in seen.recorded]
    if not failed:
        return None
    first = max(failed, key=lambda rank: bool(rank.message))
    said = first.message or f"exit code {first.exit_code}"
    reason = f"rank {first.rank}: {said}"
    if _DISK_FULL.search(said):
        # Not the cell's fault: the cell is run again when the disk has room.
        return Ending(Outcome.CANCELLED, f"the disk is full: {reason}")
    return Ending(Outcome.CRASHED, reason)


def _of_nodes(seen: Seen) -> Ending | None:
    """A node or what started the ranks has gone, or both were asked to end from outside."""
    by = seen.killed_by
    if seen.left is not None and by is None:
        return Ending(Outcome.MISSING_RANKS, f"ranks are missing: {seen.left}")
    if seen.killed_on_a_node is not None:
        # The guardian of the killed process, or srun, has asked the other ranks to end.
        return _kill(*seen.killed_on_a_node, seen, Outcome.MISSING_RANKS)
    # torchrun ends its ranks with SIGTERM also when one has failed, but then `_of_ranks` has answered.
    if seen.asked_to_end or "SIGTERM" in {by, *(rank.signal for rank in seen.exits)}:
        return Ending(Outcome.CANCELLED, "its processes were asked to end by a signal from outside")
    who = "the process that started the ranks"
    return None if by is None else _kill(who, by, seen, Outcome.MISSING_RANKS)


def _unsaid(seen: Seen) -> Ending:
    if seen.recorded:
        reason = "some ranks recorded that others went away, and no record says how those ended"
        return Ending(Outcome.MISSING_RANKS, reason)
    if seen.started or seen.exit_code is None:
        return Ending(Outcome.UNKNOWN, "the launch ended without a word; see its logs")
    see = "without a word" if seen.last_line is None else f"see {seen.last_line}"
    return Ending(Outcome.CRASHED, f"its launcher {exit_words(seen.exit_code)}, {see}")


def _kill(who: str, by: str, seen: Seen, otherwise: Outcome) -> Ending:
    """The ending by a signal: out of memory if kernels ended processes meanwhile, else `otherwise`.

    No rank's program can end a process other than its own: such a cell is run again.
    """
    kills = seen.out_of_memory_kills
    if by != "SIGKILL" or not kills:
        return Ending(otherwise, f"{who} was killed by {by}")
    return Ending(
        Outcome.OUT_OF_MEMORY,
        f"{who} was killed by SIGKILL, and meanwhile the kernel of its hosts ended "
        f"{kills} process{'es' if kills > 1 else ''} because memory ran out",
    )


def machine_fault(folder: Path, launch: Launch, exits: Sequence[RankExit]) -> str | None:
    """The line of a log that says why no launch can start on this machine; None if no line is certain."""
    found = (_MACHINE_AT_END.fullmatch(said) for said in _last_words(folder, launch, exits))
    at_end = next((match[0] for match in found if match is not None), None)
    return at_end or _first_match(_MACHINE, folder)


def _last_words(folder: Path, launch: Launch, exits: Sequence[RankExit]) -> Iterator[str]:
    """The last line of each failed rank; if torchrun names none, the last line of each launcher."""
    failed = [rank for rank in exits if rank.signal is None]
    if not failed:
        yield from (_last_line(log) for log in _logs(folder))
    yield from (rank.message for rank in failed if rank.message is not None)
    silent = {rank.rank for rank in failed if rank.message is None}
    # A rank that failed early has not said which file is its own.
    sought = {None, *silent} if silent else set()
    for file in rank_output(folder, launch):
        if file.stream == "stderr" and file.rank in sought:
            yield _last_line(file.path)


def _killed(exits: Sequence[RankExit]) -> list[RankExit]:
    """The ranks that a signal killed; torchrun itself ends the others with SIGTERM when one has failed."""
    return [rank for rank in exits if rank.signal not in (None, "SIGTERM")]


def _first_match(pattern: re.Pattern[str], folder: Path) -> str | None:
    found = (pattern.search(_text(log)) for log in _ranks_and_logs(folder))
    return next((match[0].strip() for match in found if match is not None), None)


def _logs(folder: Path) -> list[Path]:
    """The logs of the process that the supervisor started, and of the agents of nodes."""
    return sorted(folder.glob("*.log"))


def _ranks_and_logs(folder: Path) -> list[Path]:
    """The stderr of the ranks, and then the logs of torchruns and agents."""
    return [*sorted(folder.glob("torchrun/**/attempt_0/*/stderr.log")), *_logs(folder)]


def _all_logs(folder: Path) -> str:
    return "\n".join(_text(log) for log in _logs(folder))


def _last_line(path: Path) -> str:
    """The last line that is not blank; empty without one."""
    return _text(path).rstrip().rpartition("\n")[2].strip()


def _text(path: Path) -> str:
    return files.read_end(path).text
