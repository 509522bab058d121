"""How a launch ended: the exits of ranks in torchrun's report, and the outcome of runs without records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.machine.processes import signal_name
from harness.exits import exit_words, signal_name
from harness.launch.rank_output import rank_output
from harness.launch.starter import LogWords
from results import files
from results.errors import StoreError
from results.foreign_text import shortened
from results.launch import Launch, RankExit
from results.launch_files import rank_log_paths, rank_output_paths
from results.outcome import Outcome, Stopped

_FAILURE = re.compile(
    r"^\s*rank\s*:\s*(?P<rank>\d+) \(local_rank.*\n"
    r"\s*exitcode\s*:\s*(?P<code>-?\d+).*\n"
    r"\s*error_file: (?P<file>.+)$",
    re.MULTILINE,
)
_ASKED_TO_END = re.compile(r"SignalException: Process \d+ got signal: (?:1|2|15)$", re.MULTILINE)
"""What a torchrun prints when a signal has asked it to end its ranks."""
_TORCHRUN_KILLED = re.compile(r"^torchrun was killed by (?P<signal>\S+)$", re.MULTILINE)
"""What `tell_torchrun_killed` prints."""
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_RAISED = re.compile(r'\w+Error: [^"\n]*')
"""The pattern matches an exception in a rank's log or stderr."""


def rank_exits(logs: Sequence[Path]) -> tuple[RankExit, ...]:
    """The ranks that closing reports of torchruns name as failed, with the exception each left."""
    text = _text(logs)
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
    """The exception in the file that torchrun has a worker write; None if there is none."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError):
        # The worker was killed, perhaps while it wrote; its exit code says enough.
        return None
    text = message["message"] if isinstance(message, dict) else message
    return shortened(" ".join(str(text).split()))


def tell_torchrun_killed(number: int) -> None:
    """Print, for the log of a launch, that signal `number` killed this node's torchrun.

    An agent does so, because srun passes on the largest exit code of all nodes alone; `killed_on_a_node`
    reads it.
    """
    print(f"torchrun was killed by {signal_name(number)}", flush=True)


def asked_to_end(logs: Sequence[Path], *, nodes: int) -> bool:
    """Whether the torchruns of all nodes printed that a signal asked them to end."""
    # Each says it once for every handler that the signal has interrupted.
    return len({(log, said) for log in logs for said in _ASKED_TO_END.findall(_text([log]))}) >= nodes


def killed_on_a_node(
    logs: Sequence[Path], agent_killed: re.Pattern[str] | None = None
) -> tuple[str, str] | None:
    """Who was killed on one node of several, and by which signal, as its agent or the scheduler says.

    `agent_killed` is how the scheduler says that an agent was (`LogWords`).
    """
    text = _text(logs)
    torchrun = _TORCHRUN_KILLED.search(text)
    agent = None if agent_killed is None else agent_killed.search(text)
    if torchrun is not None:
        return "a node's torchrun", torchrun["signal"]
    return None if agent is None else (f"the agent of {agent['node']}", "SIGKILL")


def failed_node(logs: Sequence[Path], node_failed: re.Pattern[str] | None) -> str | None:
    """The node that has failed, as the scheduler says in the words `node_failed` (`LogWords`)."""
    found = None if node_failed is None else node_failed.search(_text(logs))
    return None if found is None else found["node"]


def unless_disk_full(folder: Path, outcome: Outcome, reason: str) -> tuple[Outcome, str]:
    """Outcome and reason of runs that lack records, given by how the launch in `folder` ended.

    If a rank failed because the disk was full, that is why nobody recorded what happened.
    """
    if outcome not in (Outcome.CRASHED, Outcome.MISSING_RANKS, Outcome.UNKNOWN):
        return outcome, reason
    logs = [*rank_log_paths(folder).values(), *rank_output_paths(folder)]
    # The last one: a rank may have continued after an earlier one.
    last = (_RAISED.findall(_text([log]))[-1:] for log in logs)
    words = next((error for found in last for error in found if _DISK_FULL.search(error)), None)
    if words is None:
        return outcome, reason
    return Outcome.CANCELLED, f"the disk is full: {shortened(words)}"


def _text(logs: Sequence[Path]) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What else is seen of a launch that has ended."""

    exit_code: int | None = None
    """Of the process that was started; of a signal the number below zero. None: the supervisor ended it."""
    asked_to_end: bool = False
    """Whether its torchruns say so."""
    killed_on_a_node: tuple[str, str] | None = None
    """Who was killed on one node of several, and by which signal, if that is known."""
    left: str | None = None
    """Which nodes said that they take part no more, and why."""
    recorded: frozenset[int] = frozenset()
    """Ranks that have written down how the run ended for them: that they left tells no more."""
    ended_early: frozenset[int] = frozenset()
    """Ranks that ended with exit code 0 while the run was going on, and wrote nothing down."""
    out_of_memory_kills: int | None = None
    """Processes that kernels ended for want of memory meanwhile; None: not known."""


def inferred_outcome(
    exits: Sequence[RankExit], stopped: Stopped | None, signs: Signs | None = None
) -> tuple[Outcome, str]:
    """Outcome and reason of a run that was in progress when its launch ended and lacks rank records.

    `exits` are the ranks that torchrun reported as failed; `stopped` is set if the supervisor ended the
    launch. An end that none of the rules recognises is `unknown`, with advice to read the logs.
    """
    if stopped is not None:
        return stopped.outcome, stopped.reason
    signs = signs or Signs()
    if signs.ended_early:
        # The others fail because these are gone.
        return _ended_early(signs.ended_early)
    exits = [rank for rank in exits if rank.signal is not None or rank.rank not in signs.recorded]
    # torchrun itself ends the other ranks with SIGTERM when one has failed.
    culprits = [rank for rank in exits if rank.signal != "SIGTERM"]
    killed = [rank for rank in culprits if rank.signal is not None]
    if killed:
        return _killed(killed, signs)
    if culprits:
        first = next((rank for rank in culprits if rank.message), culprits[0])
        return _failed(first)
    if signs.left is not None and (signs.exit_code is None or signs.exit_code >= 0):
        return Outcome.MISSING_RANKS, f"ranks are missing: {signs.left}"
    if signs.killed_on_a_node is not None:
        # Its guardian, or srun, has asked the others to end.
        return _process_killed(*signs.killed_on_a_node, signs)
    if exits or signs.asked_to_end:
        return Outcome.CANCELLED, "its processes were asked to end by a signal from outside"
    return _outcome_without_ranks(signs)


def _ended_early(ranks: frozenset[int]) -> tuple[Outcome, str]:
    who = f"rank {min(ranks)}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return (
        Outcome.CRASHED,
        f"{who} ended with exit code 0 before the run was over: the program must return, and not end its "
        f"process (os._exit)",
    )


def _killed(killed: Sequence[RankExit], signs: Signs) -> tuple[Outcome, str]:
    by_kernel = [rank for rank in killed if rank.signal == "SIGKILL"]
    if by_kernel and signs.out_of_memory_kills:
        return _out_of_memory(f"rank {by_kernel[0].rank}", signs.out_of_memory_kills)
    return Outcome.CRASHED, f"rank {killed[0].rank} was killed by {killed[0].signal}"


def _failed(rank: RankExit) -> tuple[Outcome, str]:
    reason = f"rank {rank.rank}: {rank.message or f'exit code {rank.exit_code}'}"
    if rank.message and _DISK_FULL.search(rank.message):
        # Not the cell's fault: it is run again when there is room.
        return Outcome.CANCELLED, f"the disk is full: {reason}"
    return Outcome.CRASHED, reason


def _outcome_without_ranks(signs: Signs) -> tuple[Outcome, str]:
    """No rank was reported as failed: the outcome follows from how the process that started them ended."""
    code = signs.exit_code
    if signs.recorded and (code is None or code >= 0):
        words = "some ranks wrote down that others went away, and nobody tells how those ended"
        return Outcome.MISSING_RANKS, words
    if code is None or code >= 0:
        return Outcome.UNKNOWN, "the launch ended without a word; see its logs"
    name = signal_name(-code)
    if name == "SIGTERM":
        return Outcome.CANCELLED, "its processes were asked to end by a signal from outside"
    return _process_killed("the process that started the ranks", name, signs)


def _process_killed(who: str, name: str, signs: Signs) -> tuple[Outcome, str]:
    if name == "SIGKILL" and signs.out_of_memory_kills:
        return _out_of_memory(who, signs.out_of_memory_kills)
    # No rank's program can do that: the cell is run again.
    return Outcome.MISSING_RANKS, f"{who} was killed by {name}"


def _out_of_memory(who: str, kills: int) -> tuple[Outcome, str]:
    return (
        Outcome.OUT_OF_MEMORY,
        f"{who} was killed by SIGKILL, and meanwhile the kernel of its hosts ended "
        f"{kills} process{'es' if kills > 1 else ''} for want of memory",
    )


_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_TOLD = re.compile(r"out-of-memory kills on this host: (?P<kills>\d+)")
"""What an agent prints."""


def out_of_memory_kills(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Out-of-memory kills in this process's control group, or, if it has no such counter, on the host.

    They are counted since the group was made, or since the host started: use the difference over a launch.
    None if the kernel has no such counter. Sources: cgroup-v2.rst, memory.events (with the groups below);
    cgroup-v1/memory.rst, memory.oom_control (this group alone); /proc/vmstat.
    """
    counted = (_count_kills(path) for path in (*_of_own_group(proc, cgroups), proc / "vmstat"))
    return next((kills for kills in counted if kills is not None), None)


def tell_kills(kills: int) -> None:
    """Print, for the log of a launch, what `kills_told` reads; nothing if there were none."""
    if kills:
        print(f"out-of-memory kills on this host: {kills}", flush=True)


def kills_told(logs: Sequence[Path], scheduler: re.Pattern[str] | None = None) -> int | None:
    """The sum of the kills that agents print in the logs of a launch; None if none is printed.

    `scheduler` matches a scheduler's own message about such kills, with the group `kills` (`LogWords`).
    """
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    ways = [_TOLD, *([] if scheduler is None else [scheduler])]
    told = [int(found["kills"]) for text in texts for way in ways for found in way.finditer(text)]
    return sum(told) if told else None


def _of_own_group(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The files that may count, the best first."""
    for line in _ascii(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _counters_below(cgroups / "memory", path, "memory.oom_control")
        elif not controllers:
            yield from _counters_below(cgroups, path, "memory.events")


def _counters_below(root: Path, path: str, name: str) -> Iterator[Path]:
    yield root / path.lstrip("/") / name
    # In a container the group's own folder is often mounted as the root.
    yield root / name


def _count_kills(path: Path) -> int | None:
    found = _KILLS.search(_ascii(path))
    return None if found is None else int(found[1])


def _ascii(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def say_left(folder: Path, node_rank: int, why: str) -> None:
    """Tell the launch's supervisor that node `node_rank` has left, and `why`, a clause.

    The first note of a node stays. If the note cannot be written, the other ranks wait longer, no more.
    """
    with suppress(StoreError):
        files.write_once(_note_path(folder, node_rank), f"{why}\n".encode())


def who_left(folder: Path) -> str | None:
    """The nodes of a launch that have left, each with its reason; None: none has."""
    words = {int(path.stem.removeprefix("left-")): path for path in folder.glob("left-*.txt")}
    said = []
    for node, path in sorted(words.items()):
        with suppress(OSError):
            said.append(f"node {node}: {path.read_text(encoding='utf-8').strip()}")
    return "; ".join(said) or None


def _note_path(folder: Path, node_rank: int) -> Path:
    return folder / f"left-{node_rank}.txt"


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
    found = (words.search(_content(log)) for log in _printed(folder))
    return next((match["words"] for match in found if match is not None), None)


def machine_fault(folder: Path, launch: Launch, exits: Sequence[RankExit]) -> str | None:
    """Why no launch can start on this machine, in the words of a log; None if that is not certain."""
    if _any_killed(exits):
        return None
    found = (_MACHINE_AT_END.fullmatch(said) for said in _last_words(folder, launch, exits))
    at_end = next((match[0] for match in found if match is not None), None)
    return at_end or _first_match(_MACHINE, folder)


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
    return None if _any_killed(exits) else _first_match(_NO_RENDEZVOUS, folder)


def log_end(folder: Path) -> str | None:
    """The last line that a launch has printed, with its file; None if it has printed nothing."""
    said = ((log, _last_line(log)) for log in _printed(folder))
    return next((f"{log}: {line}" for log, line in said if line), None)


def _launcher_failed(folder: Path, exit_code: int) -> str:
    said = log_end(folder)
    return f"its launcher {exit_words(exit_code)}, " + ("without a word" if said is None else f"see {said}")


def _any_killed(exits: Sequence[RankExit]) -> bool:
    return any(rank.signal not in (None, "SIGTERM") for rank in exits)


def _first_match(words: re.Pattern[str], folder: Path) -> str | None:
    found = (words.search(_content(log)) for log in _printed(folder))
    return next((match[0].strip() for match in found if match is not None), None)


def _printed(folder: Path) -> Iterator[Path]:
    """What the ranks have printed, and then torchruns and agents."""
    yield from sorted(folder.glob("torchrun/**/attempt_0/*/stderr.log"))
    yield from sorted(folder.glob("*.log"))


def _last_line(path: Path) -> str:
    """The last line that is not blank; empty if there is none."""
    return _content(path).rstrip().rpartition("\n")[2].strip()


def _content(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
