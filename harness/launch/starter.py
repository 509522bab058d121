"""How the workers of a launch are started: on this machine, or by the scheduler in an allocation."""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from harness.launch.command import local_command
from results.launch import Launch
from results.outcome import Ending, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWords:
    """Patterns of the messages that a scheduler's own programs print into the logs of a launch."""

    agent_killed: re.Pattern[str] | None = None
    """The program that starts the ranks of a node was killed; the group `node` names the node."""
    node_failed: re.Pattern[str] | None = None
    """A node of the launch has failed; the group `node` names it."""
    out_of_memory: re.Pattern[str] | None = None
    """The kernel ended processes because memory ran out; the group `kills` has their number."""
    scheduler_away: re.Pattern[str] | None = None
    """A launch could not be started because the scheduler did not answer; the group `words` says how."""
    allocation_over: re.Pattern[str] | None = None
    """A launch could not be started because the scheduler has ended the job; the group `words` says how."""
    start_delayed: re.Pattern[str] | None = None
    """The scheduler says that it does not start a launch yet; the group `words` says why."""
    agent_logs: str | None = None
    """The glob finds the logs that exist as soon as the scheduler has started a launch; None: not known."""


class Starter(ABC):
    """Starts launches, one after another."""

    hosts: bool = True
    """Whether each node of a placement is a separate host."""
    pins: bool = True
    """Whether ranks may be bound to cores; not where other jobs on the host may bind to the same ones."""
    tells_kills: bool = False
    """Whether what it starts prints the kernel's out-of-memory kills of each host."""
    log_words: LogWords = LogWords()
    threads: int | None = None
    """Threads of a rank with a GPU; None: its share of this machine's cores."""
    supervisor_pid: int | None = None
    """The bench that supervises the launch, if it is on the host of the ranks; kept in `launch.json`. The
    ranks of other hosts cannot see this process."""

    @abstractmethod
    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        """The command that starts the workers of a new launch, whose file is `path`, and ends after them."""

    @property
    def most_delay_s(self) -> float:
        """Seconds that a launch may wait while the scheduler says that it does not start it yet."""
        return math.inf

    def interruption(self) -> Ending:
        """Why this process has been asked to end."""
        return Ending(Outcome.CANCELLED, "interrupted by the user")

    def notice(self) -> Ending | None:
        """Why the scheduler ends the job and its workers; None if it has announced no end."""
        return None


class LocalStarter(Starter):
    """Workers that are children of this process."""

    hosts = False

    def __init__(self) -> None:
        self.supervisor_pid = os.getpid()

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        return local_command(launch, path)
