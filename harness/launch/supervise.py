"""The supervisor of one launch: it starts torchrun, follows the ranks' logs, and records the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from harness.launch.command import worker_environment
from harness.launch.conduct import Deadline
from harness.launch.ending import (
    Seen,
    asked_to_end,
    judged,
    look_back,
    never_started,
    out_of_memory_kills,
    scheduler_said,
    unless_disk_full,
    who_left,
)
from harness.launch.follow import LaunchState, LogTail, Pulse, hang_reason, heartbeats
from harness.launch.guarded import Guarded
from harness.launch.starter import Starter
from harness.worker.rank.log import MARGIN_S
from results.files import no_follow
from results.foreign_text import REASON_CHARACTERS, shortened
from results.launch import Attempt, Launch, flight_paths, rank_log_path, torchrun_log_path
from results.outcome import Ending, Outcome
from results.plan import kind_of
from results.store import Study, utc_now

POLL_S = 0.1
LOOK_S = 1.0
"""Seconds between two looks at the logs of all ranks, which may be hundreds on a shared file system."""
PATIENCE_S = 10.0
"""Seconds after a node has left in which the other ranks may notice, write their records, and end."""
NOTICE_S = 30.0
"""Seconds that the scheduler may take to print why, after it has refused a launch because the job ended."""


class Interrupted(Exception):
    """This process was asked to end; its launch has been stopped and recorded."""

    def __init__(self, stopped: Ending) -> None:
        super().__init__(stopped.reason)
        self.stopped = stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The ways in which a campaign follows, ends and locks each of its launches."""

    report: Callable[[LaunchState], None]
    """Called with rank 0's progress, about ten times a second."""
    deadline: Deadline
    lock: int | None = None
    """Descriptor that the workers inherit, so that the study stays locked as long as they live."""


class Supervisor:
    """Runs one launch until it has ended and writes its attempt, whatever the end is."""

    def __init__(self, study: Study, launch: Launch, checkout: Path, starter: Starter, watch: Watch) -> None:
        self._study = study
        self._launch = launch
        self._checkout = checkout
        self._starter = starter
        self._watch = watch
        self._folder = study.launch_folder(launch.launch_id)
        self._tail = LogTail(rank_log_path(self._folder, 0))
        self._state = LaunchState(kind=kind_of(launch.order))
        self._ready_at: float | None = None
        self._kills_before: int | None = None
        self._left_at: float | None = None
        """When this supervisor first saw that a node has left the launch; by the monotonic clock."""
        self._deserted_by: str | None = None
        """The nodes that left, if this supervisor ended the launch because of it."""

    def run(self) -> tuple[Attempt, Seen]:
        """Start the workers and stay until they have ended.

        Raises Interrupted after Ctrl-C, SIGTERM or SIGHUP, when the workers are gone and the attempt is
        written.
        """
        path = self._study.add_launch(self._launch).resolve()
        command = self._starter.command(self._launch, path)
        started_at, began = utc_now(), time.monotonic()
        self._kills_before = out_of_memory_kills()
        with open(torchrun_log_path(self._folder), "wb", opener=no_follow) as log:
            process = Guarded(
                command,
                log=log,
                environment=worker_environment(self._launch, self._checkout),
                descriptors=() if self._watch.lock is None else (self._watch.lock,),
            )
            stopped: Ending | None = Ending(Outcome.UNKNOWN, "the supervisor failed")
            try:
                stopped, interrupted = self._until_end(process)
            finally:
                # After any error, all workers are ended and the launch still gets its record.
                with _deaf() as heard:
                    exit_code = process.end()
                    seen = self._look_back(exit_code, stopped)
                    attempt = self._attempt(command, started_at, began, exit_code, seen)
                    self._study.add_attempt(attempt)
                    if not seen.started:
                        # Results are listed by the folders of runs: the run of the first slot shows how the
                        # launch ended.
                        first = self._launch.slots[0]
                        self._study.start_run(first.cell_id, first.run_id)
        if interrupted:
            assert stopped is not None
            raise Interrupted(stopped)
        if heard:
            raise Interrupted(self._starter.interruption())
        return attempt, seen

    def _until_end(self, process: Guarded) -> tuple[Ending | None, bool]:
        """Watch the launch. Returns why it is ended (None: it ended by itself), and whether the job is
        over."""
        try:
            stopped = self._watch_over(process)
            over = self._job_over(stopped)
        except KeyboardInterrupt:
            with _deaf():
                return self._starter.interruption(), True
        return (stopped, False) if over is None else (over, True)

    def _job_over(self, stopped: Ending | None) -> Ending | None:
        """Why the job of a launch that has ended is over; None if it is not."""
        refused = self._refused() if stopped is None else None
        if refused is not None:
            return refused
        failed = scheduler_said(self._folder, self._starter.log_words.node_failed)
        if failed is not None and (stopped is None or stopped.outcome is Outcome.HUNG):
            # Even if the job may continue without the node, no other launch of this size can start.
            reason = f"the scheduler says that the node {failed['node']} failed"
            return self._starter.notice() or Ending(Outcome.NODE_FAILED, reason)
        if stopped is None and asked_to_end(self._folder, nodes=self._launch.placement.nodes):
            # A scheduler that ends a job may reach the workers before it reaches this process.
            return self._starter.notice()
        return None

    def _refused(self) -> Ending | None:
        """Why the scheduler has refused the launch, if it did because the job has ended; else None.

        The scheduler may say only a while later why, and may also send a signal meanwhile.
        """
        words = self._starter.log_words
        over = None if self._state.started else scheduler_said(self._folder, words.allocation_over)
        if over is None:
            return None
        end = time.monotonic() + NOTICE_S
        while time.monotonic() < end:
            if (notice := self._starter.notice()) is not None:
                return notice
            time.sleep(POLL_S)
        return Ending(Outcome.CANCELLED, f"its allocation was over: {over['words']}")

    def _watch_over(self, process: Guarded) -> Ending | None:
        """Return when the launch has ended or is to be ended: None if it ended by itself, or a node left."""
        pulse = Pulse(self._folder, self._launch.placement)
        look_at, waits = 0.0, True
        while True:
            ended = process.poll() is not None
            self._read_log()
            self._watch.report(self._state)
            if ended:
                return None
            if self._watch.deadline.is_over:
                return Ending(Outcome.TIMED_OUT, self._watch.deadline.reason)
            if time.monotonic() > look_at:
                look_at = time.monotonic() + LOOK_S
                if waits and not never_started(self._folder, self._starter.log_words):
                    # The time that the scheduler took does not count as silence of the ranks.
                    waits, pulse = False, Pulse(self._folder, self._launch.placement)
                hung = self._not_started(pulse) if waits else self._hung(pulse)
                self._state.waits_for = pulse.waits_for()
                if hung is not None:
                    return hung
                if self._deserted():
                    return None
            time.sleep(POLL_S)

    def _not_started(self, pulse: Pulse) -> Ending | None:
        """Return the ending of a launch of which the scheduler has started no process for too long.

        No program of the cell runs, so this is not a hang. The limit is shorter where the scheduler says that
        it waits; an image that is fetched, or a scheduler that says nothing, has `silence_s`.
        """
        said = scheduler_said(self._folder, self._starter.log_words.start_delayed)
        limit_s, words = self._launch.silence_s, "it has not said why"
        if said is not None:
            limit_s, words = min(limit_s, self._starter.most_delay_s), said["words"]
        if min(pulse.silence_s().values()) <= limit_s:
            return None
        reason = f"the scheduler started no process within {limit_s:.0f} s: {words}"
        return Ending(Outcome.NODE_FAILED, reason)

    def _hung(self, pulse: Pulse) -> Ending | None:
        """Return the ending of a launch that is silent; None while a rank's log grows.

        After `silence_s` without growth of any rank's log the launch hangs.
        """
        if min(pulse.silence_s().values()) <= self._launch.silence_s:
            return None
        self._await_recordings()
        silence_s = pulse.silence_s()
        if min(silence_s.values()) <= self._launch.silence_s:
            return None
        return Ending(Outcome.HUNG, hang_reason(self._folder, silence_s, self._state.kind))

    def _deserted(self) -> bool:
        """Whether a node has left, and the others have not ended within PATIENCE_S."""
        left = who_left(self._folder)
        if self._left_at is None and left is not None:
            self._left_at = time.monotonic()
        if self._left_at is not None and time.monotonic() - self._left_at > PATIENCE_S:
            self._deserted_by = left
        return self._deserted_by is not None

    def _await_recordings(self) -> None:
        """Wait until the ranks' watchdogs have written their flight recordings, or MARGIN_S is over."""
        end = time.monotonic() + MARGIN_S
        while time.monotonic() < end:
            if len(flight_paths(self._folder)) == self._launch.placement.gpus:
                return
            time.sleep(POLL_S)

    def _read_log(self) -> None:
        for event in self._tail.events():
            self._state.take(event)
        if self._state.ready and self._ready_at is None:
            self._ready_at = time.monotonic()

    def _look_back(self, exit_code: int | None, stopped: Ending | None) -> Seen:
        # A run may have begun between the last look and the end.
        self._read_log()
        # Another rank may have begun a run that rank 0 had not reached.
        begun = {*self._state.started, *(slot.run_id for slot in self._study.begun_slots(self._launch))}
        started = [slot.run_id for slot in self._launch.slots if slot.run_id in begun]
        now, before = None if self._starter.tells_kills else out_of_memory_kills(), self._kills_before
        known = Seen(
            started=tuple(started),
            recorded=self._records(started[-1]) if started else frozenset(),
            stopped=stopped,
            exit_code=exit_code if self._deserted_by is None else None,
            out_of_memory_kills=None if now is None or before is None else max(now - before, 0),
        )
        return look_back(self._folder, self._launch, self._starter.log_words, known)

    def _attempt(
        self, command: tuple[str, ...], started_at: str, began: float, exit_code: int | None, seen: Seen
    ) -> Attempt:
        ranks = self._launch.placement.gpus
        # If no run began, that of the first slot gets the ending; all other cells are still to be done.
        runs = seen.started or (self._launch.slots[0].run_id,)
        unfinished = [run for run in runs if len(self._records(run)) < ranks]
        ending = judged(seen)
        if unfinished and seen.started and seen.stopped is None:
            ending = unless_disk_full(self._folder, ending)
        return Attempt(
            launch_id=self._launch.launch_id,
            command=command,
            started_at=started_at,
            ended_at=utc_now(),
            exit_code=exit_code,
            stopped_by=self._deserted_by if seen.stopped is None else seen.stopped.reason,
            outcomes=dict.fromkeys(unfinished, ending.outcome),
            reasons=dict.fromkeys(unfinished, shortened(ending.reason, REASON_CHARACTERS)),
            ranks=seen.exits,
            heartbeats={str(rank): at for rank, at in heartbeats(self._folder).items()},
            out_of_memory_kills=seen.out_of_memory_kills,
            startup_ns=None if self._ready_at is None else round((self._ready_at - began) * 1e9),
        )

    def _records(self, run_id: str) -> frozenset[int]:
        cell_id = next(slot.cell_id for slot in self._launch.slots if slot.run_id == run_id)
        ranks = range(self._launch.placement.gpus)
        return frozenset(rank for rank in ranks if self._study.rank_path(cell_id, run_id, rank).exists())


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a study: SIGHUP of a lost terminal unless it is ignored, as under nohup."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@contextmanager
def handled(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle these signals by `handler` in this context."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


@contextmanager
def _deaf() -> Iterator[list[int]]:
    """Hold back the signals that end a study while the workers are ended and the attempt is written.

    Yields the list of the signals that arrive in this context.
    """
    heard: list[int] = []
    with handled(ending_signals(), lambda number, frame: heard.append(number)):
        yield heard
