"""A launch: one torchrun whose workers run cells of one placement, one after another.

This module also has the names of the files without a schema that ranks and torchrun write into its folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from results.cell import Backend, Device
from results.environment import CodeVersion
from results.job import SILENCE_S, OnFailedProof
from results.outcome import Ending, Evidence, Outcome
from results.plan import Order, Placement
from results.value_types import require_times


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one cell, to be done in a launch."""

    cell_id: str
    run_id: str
    repeat: int
    """1 for the first repeat."""
    proved_by: str | None = None
    """The run that has checked this cell's training already; None: this run does."""


class JobVariables(msgspec.Struct, frozen=True, kw_only=True):
    """The environment variables in which a scheduler names the job of a process."""

    scheduler: str
    job: str
    """The variable with the job's number."""
    restarts: str
    """The variable with how often the job was put back into the queue."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's input, the same on every host."""

    launch_id: str
    placement: Placement
    device: Device
    backend: Backend
    evidence: Evidence
    slots: tuple[Slot, ...]
    code: CodeVersion
    threads: int = 1
    """Threads of one rank on CPU."""
    pin: bool = True
    """Whether each rank is bound to its own cores."""
    job_id: str | None = None
    """The job in whose allocation it runs; None: it was started here, or by hand."""
    silence_s: float = SILENCE_S
    """Seconds without progress after which a rank prints its stacks and the launch is ended."""
    trace: tuple[int, ...] = ()
    """Ranks that keep the profiler's trace of a few steps after each run; ranks that do not exist are
    ignored."""
    tensorboard: bool = False
    """Whether each rank writes the scalars of its steps for TensorBoard, between blocks."""
    link_mbit_per_s: float | None = None
    """Rate at which each virtual node sends and receives; None: the network is not shaped."""
    source_folder: str | None = None
    """The folder from which `py:` workloads are imported."""
    supervisor_pid: int | None = None
    """The bench that supervises it on this host; None: it was started by hand or in a job."""
    warnings: tuple[str, ...] = ()
    """Findings of the preflight, kept on every record of the launch."""
    job_variables: tuple[JobVariables, ...] = ()
    """Variables of every scheduler in whose jobs its ranks may run: a rank records its job."""
    forks: bool = False
    """Whether each slot is run by a separate process, which is forked from the rank and ends with the run."""
    order: Order | None = None
    """The work of its ranks; None: they measure steps."""
    env: tuple[str, ...] = ()
    """Environment variables of its cells (`Cell.env`)."""
    python: str | None = None
    """The interpreter of its cells' engine; None: bench's own."""
    proof: OnFailedProof = "strict"
    """Whether a run whose proof fails ends (`strict`), or measures on as one that is not proven."""


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker process ended, by torchrun's report."""

    rank: int
    exit_code: int | None
    signal: str | None
    message: str | None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a launch, as its supervisor saw it. Written once."""

    launch_id: str
    command: tuple[str, ...]
    """Empty if the supervisor was lost, and another process found that out."""
    started_at: str | None
    ended_at: str
    exit_code: int | None
    stopped_by: str | None
    """Why the supervisor ended it: a signal, silence, time, a node that left; None if it ended by itself."""
    outcomes: dict[str, Outcome]
    """Outcomes that the supervisor concluded for runs without complete rank records, by run id."""
    reasons: dict[str, str]
    ranks: tuple[RankExit, ...]
    heartbeats: dict[str, str] = {}
    """The time of each rank's last heartbeat, by rank."""
    out_of_memory_kills: int | None = None
    """Processes that kernels on the launch's hosts killed out of memory; None: not known."""
    scheduler: str | None = None
    """The scheduler's description of the job when something outside ended the launch."""
    startup_ns: int | None
    """Time from the start of torchrun to the first cell of rank 0; None if no cell began."""

    def __post_init__(self) -> None:
        require_times(self.started_at, self.ended_at)

    def ending(self, run_id: str) -> Ending | None:
        """How the supervisor concluded that a run ended; None for a run with complete rank records."""
        outcome = self.outcomes.get(run_id)
        return (
            None if outcome is None else Ending(outcome, self.reasons.get(run_id, "no reason was recorded"))
        )


EVENT = msgspec.json.Decoder(dict[str, Any])
"""Decodes a line of the log of a rank."""
RUN_MARK = "--- run "
"""The mark in a rank's stdout and stderr where the output of a run begins; the run's id follows."""


def torchrun_log_path(folder: Path) -> Path:
    """The output of the process that starts the workers: torchrun, or srun."""
    return folder / "torchrun.log"


def rank_log_path(folder: Path, rank: int) -> Path:
    """A rank's events, one JSON object a line."""
    return folder / f"rank-{rank:05d}.jsonl"


def rank_log_paths(folder: Path) -> dict[int, Path]:
    return _by_rank(folder, "rank-*.jsonl")


def torchrun_folder(folder: Path, node: int | str | None) -> Path:
    """The folder that a node's torchrun makes as soon as it starts; `node` None: the launch is on one."""
    return folder / "torchrun" if node is None else folder / "torchrun" / f"node-{node}"


def rank_output_paths(folder: Path) -> list[Path]:
    """The output of ranks: stdout.log and stderr.log in a folder that has the rank's number on its node."""
    return sorted(folder.glob("torchrun/**/attempt_0/*/std*.log"))


def nccl_log_path(folder: Path, rank: int) -> Path:
    """The log of NCCL, which says how it connects."""
    return folder / f"nccl-{rank:05d}.log"


def flight_path(folder: Path, rank: int) -> Path:
    """The last collectives of a rank without progress, as its backend keeps them."""
    return folder / f"flight-{rank:05d}.json"


def flight_paths(folder: Path) -> dict[int, Path]:
    """The recordings that are there, by rank."""
    return _by_rank(folder, "flight-*.json")


def _by_rank(folder: Path, pattern: str) -> dict[int, Path]:
    return {int(re.findall(r"\d+", path.name)[0]): path for path in sorted(folder.glob(pattern))}
