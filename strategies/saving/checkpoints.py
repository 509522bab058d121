"""Save the state of all ranks to a folder, asynchronously if asked for, and resume from it.

Ranks agree before they branch: if one of them finds a full disk, a torn file or another model, all of them
know it before the next message, so that they do the same.
"""

from __future__ import annotations

import math
import secrets
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from results.checkpoint import Checkpoint, FileSum, LaidOut
from results.errors import NewerSchemaError, SchemaError, StoreError, UsageError
from results.files import refresh
from strategies.optimizers import OPTIMIZERS
from strategies.saving.agreement import Ranks, SystemRefusedError
from strategies.saving.planners import BoxSavePlanner, Reading
from strategies.saving.run_folder import METADATA, Kept, RunFolder, advice, best_of, sum_of, torn
from strategies.saving.state import (
    RankState,
    Resumable,
    dumped,
    laid_out,
    optimizer_name,
    require_groups,
    require_optimizer,
    restore,
    state_of,
    tensors_of,
)
from strategies.saving.whole import replicas_differ
from strategies.training.boxes import Box

CPU = torch.device("cpu")
UNLIKE = "what follows need not be bit for bit"
_SETTINGS = (
    *("precision", "accumulation", "clip_norm", "activation_checkpointing", "compile", "memory_format"),
    "seed",
)
"""Settings that decide the bits of a step, other than layout and optimizer."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written, or training does not resume from it bit for bit."""


class Saving:
    """A checkpoint on its way to the disk."""

    def __init__(self, written: Future[Path]) -> None:
        self._written = written
        self._told = False

    def wait(self) -> Path | None:
        """Wait until all ranks have written the checkpoint, and return its folder; return None on all ranks,
        with a CheckpointWarning, if it could not be written."""
        return self.told(stacklevel=3)

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank; other ranks may see this earlier or later."""
        return self._written.done()

    def ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the save to end, and return whether it has ended."""
        return bool(wait((self._written,), timeout=seconds).done)

    @property
    def failure(self) -> str | None:
        """Why a save that is done wrote no checkpoint; None if it wrote one."""
        error = self._written.exception()
        return None if error is None else str(error)

    def told(self, *, stacklevel: int) -> Path | None:
        """Do what `wait` does, for a caller `stacklevel` calls away from the user's line."""
        failure = self._written.exception()
        if failure is None:
            return self._written.result()
        if not isinstance(failure, StoreError):
            raise failure
        if not self._told:
            self._told = True
            warnings.warn(
                f"no checkpoint: {failure}; training continues", CheckpointWarning, stacklevel=stacklevel
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The checkpoint that training resumes from."""

    path: Path
    step: int
    exact: bool
    """Whether each rank resumes as the same rank of the same layout."""
    notes: tuple[str, ...]
    """Why training may not continue bit for bit, a sentence each; empty if it does."""


class Checkpoints:
    """The checkpoints of one trainer."""

    def __init__(self, trainer: Resumable) -> None:
        """Collective."""
        self._trainer = trainer
        # A separate link: a thread that saves in parallel with training may use it.
        self._ranks = Ranks(None if trainer.link is None else trainer.link.beside(), CPU)
        self._session = secrets.token_hex(8)
        """Only the value on rank 0 counts, because rank 0 reads the folder for all ranks; the same holds for
        the next three attributes."""
        self._known: set[tuple[int, str]] = set()
        """Step and session of the checkpoints that this trainer has written or resumed from."""
        self._earlier: set[tuple[int, str]] = set()
        """Step and session of the checkpoints that it wrote before it loaded another state."""
        self._torn: set[Path] = set()
        """Torn checkpoints that `resume` has skipped."""
        self._under_way: Saving | None = None
        self._thread: ThreadPoolExecutor | None = None

    def save(
        self,
        folder: Path,
        *,
        keep: int | None,
        metric: float | None,
        metric_name: str | None,
        asynchronous: bool,
    ) -> Saving:
        if keep is not None and keep < 1:
            raise UsageError(f"keep is at least 1 (the last checkpoint), not {keep}")
        self._end_last()
        run, trainer = RunFolder(folder), self._trainer
        done: Future[Path] = Future()
        saving = Saving(done)
        saved = self._ranks.from_first(lambda: self._saved(run))
        if saved is not None:
            was, now = saved.manifest.metric, _comparable(metric)
            if now is not None and now != was:
                warnings.warn(
                    f"{saved.path} is written already, with the metric {was}: {now} is not recorded",
                    CheckpointWarning,
                    stacklevel=3,
                )
            done.set_result(saved.path)
            return saving
        try:
            temporary = self._ranks.from_first(lambda: self._begin(run))
        except StoreError as error:
            done.set_exception(error)
            saving.told(stacklevel=4)
            return saving
        share = self._share()
        state = self._ranks.agree(lambda: state_of(trainer, share))
        write = _Write(self._ranks, run, temporary, state, self._manifest(metric, metric_name), keep)
        self._under_way = saving
        if not asynchronous:
            _settle(done, write)
            saving.told(stacklevel=4)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._thread.submit(_settle, done, write)
        # A checkpoint that could not be written is not in the folder: later ones are still of this run.
        self._known.add((trainer.steps, self._session))
        return saving

    def start_from_loaded(self) -> None:
        """Note that the trainer has loaded a state that is not from a checkpoint. Checkpoints that it wrote
        up to that step may precede the next one; later ones belong to another run."""
        every = self._known | self._earlier
        self._earlier = {(step, session) for step, session in every if step <= self._trainer.steps}
        self._known, self._session = set(), secrets.token_hex(8)

    def _end_last(self) -> None:
        """Wait for the save under way; its failure is reported once."""
        last, self._under_way = self._under_way, None
        if last is not None:
            last.told(stacklevel=5)

    def _saved(self, run: RunFolder) -> Kept | None:
        """Return the checkpoint of the trainer's present state, if the folder has it."""
        try:
            kept = run.read(run.place(self._trainer.steps))
        except (SchemaError, StoreError):
            return None
        return kept if (kept.manifest.step, kept.manifest.session) in self._known else None

    def _begin(self, run: RunFolder) -> Path:
        torn = {path for path in self._torn if path.parent == run.path.resolve()}
        run.set_aside(torn)
        self._torn -= torn
        return run.begin(self._trainer.steps, self._session, self._known | self._earlier)

    def _share(self) -> set[tuple[str, str]]:
        """Return the rectangles that this rank copies and writes: a rectangle that several ranks have is
        written by the one with the fewest bytes so far."""
        own = {(kind, box.text): value.nbytes for kind, box, value in tensors_of(self._trainer)}
        if replicas_differ(self._trainer.settings.strategy):
            return set(own)
        every = self._ranks.gather(own)
        written, shares = [0] * len(every), [set[tuple[str, str]]() for _ in every]
        for each in dict.fromkeys(each for rank in every for each in rank):
            owners = [rank for rank, there in enumerate(every) if each in there]
            owner = min(owners, key=lambda rank: written[rank])
            shares[owner].add(each)
            written[owner] += every[owner][each]
        return shares[self._ranks.rank]

    def _manifest(self, metric: float | None, metric_name: str | None) -> Checkpoint:
        trainer = self._trainer
        return Checkpoint(
            step=trainer.steps,
            session=self._session,
            laid_out=laid_out(trainer),
            optimizer=optimizer_name(trainer),
            own_replicas=replicas_differ(trainer.settings.strategy),
            conditions=self._conditions(),
            files={},
            metric=_comparable(metric),
            metric_name=None if metric is None else metric_name,
        )

    def _conditions(self) -> dict[str, str]:
        """Return the conditions of all ranks by name, each different value once; collective."""
        every = self._ranks.gather(conditions(self._trainer))
        return {what: ", ".join(dict.fromkeys(each[what] for each in every)) for what in every[0]}

    def resume(self, folder: Path, step: int | str | None) -> Resumed | None:
        self._end_last()
        kept = self._choose(RunFolder(folder), step)
        if kept is None:
            return None
        trainer, manifest = self._trainer, kept.manifest
        mine = laid_out(trainer)
        exact = manifest.laid_out == mine
        self._ranks.agree(lambda: self._require_possible(manifest, exact=exact))
        state = self._ranks.agree(lambda: self._read(kept, exact=exact))
        restore(trainer, state, exact=exact)
        # Checkpoints that it wrote after that step belong to another run from now on.
        self._known, self._earlier = {(manifest.step, manifest.session)}, set()
        self._session = secrets.token_hex(8)
        unattached = self._ranks.gather(_unattached(trainer, state))
        notes = (
            *_notes(trainer, manifest, self._conditions(), exact=exact),
            *dict.fromkeys(note for of_rank in unattached for note in of_rank),
        )
        for note in notes if self._ranks.rank == 0 else ():
            warnings.warn(f"{kept.path}: {note}", CheckpointWarning, stacklevel=3)
        return Resumed(path=kept.path, step=manifest.step, exact=exact, notes=notes)

    def _require_possible(self, manifest: Checkpoint, *, exact: bool) -> None:
        require_optimizer(self._trainer, manifest.optimizer)
        if not exact and self._trainer.steps > 0:
            raise UsageError(
                f"the checkpoint is of {_told(manifest.laid_out)}, and this trainer, which has trained, is "
                f"{_told(laid_out(self._trainer))}: a trainer that has trained resumes only from the same "
                f"layout; make a new one, and resume it"
            )

    def _read(self, kept: Kept, *, exact: bool) -> RankState:
        state = Reading(self._trainer, kept, self._ranks.rank, exact=exact).state()
        require_groups(self._trainer, state)
        return state

    def _choose(self, run: RunFolder, step: int | str | None) -> Kept | None:
        """Return the newest checkpoint whose files are all intact, or the one that was asked for."""
        passed_over: set[Path] = set()
        for path in self._ranks.from_first(lambda: _candidates(run, step)):
            try:
                kept = self._verified(run, path)
            except NewerSchemaError:
                raise
            except (SchemaError, StoreError) as error:
                if step is not None:
                    raise
                if self._ranks.rank == 0:
                    warnings.warn(
                        f"{path} is not complete: {error}; resuming from an earlier one",
                        CheckpointWarning,
                        stacklevel=4,
                    )
                passed_over.add(path.resolve())
            else:
                self._torn = passed_over
                return kept
        if self._ranks.from_first(lambda: any(run.path.glob("step-*"))):
            raise StoreError(
                f"{run.path} has no intact checkpoint: put a copy back, or remove the folder to start again"
            )
        return None

    def _verified(self, run: RunFolder, path: Path) -> Kept:
        """Have each rank check its share of the files. Raises SchemaError if one is not what was written."""
        kept = self._ranks.from_first(lambda: run.read(path))
        files = kept.manifest.files
        size = self._trainer.link.size if self._trainer.link is not None else 1

        def look() -> None:
            wrong = torn(path, files, sorted(files)[self._ranks.rank :: size])
            if wrong is not None:
                raise SchemaError(wrong)

        self._ranks.agree(look)
        return kept


def _comparable(metric: float | None) -> float | None:
    """Return the metric as a number by which checkpoints are compared; None if it is not finite."""
    return float(metric) if metric is not None and math.isfinite(metric) else None


def _settle(done: Future[Path], write: Callable[[], Path]) -> None:
    try:
        done.set_result(write())
    except BaseException as error:  # the waiting thread raises it
        done.set_exception(error)


def _candidates(run: RunFolder, step: int | str | None) -> list[Path]:
    if step is None:
        return sorted(run.path.glob("step-*"), reverse=True)
    if step == "best":
        best = best_of(run.kept())
        if best is None:
            raise StoreError(f"{run.path} has no checkpoint with a metric: give save(..., metric=...)")
        return [best.path]
    if not isinstance(step, int):
        raise UsageError(f"step is a number, 'best' or None (the newest), not {step!r}")
    if not run.place(step).exists():
        there = ", ".join(str(kept.manifest.step) for kept in run.kept()) or "none"
        raise StoreError(f"{run.path} has no checkpoint of step {step}; complete ones: {there}")
    return [run.place(step)]


def conditions(trainer: Resumable) -> dict[str, str]:
    """Return the conditions on this rank, other than the layout, that decide the bits of a step."""
    settings = trainer.settings
    return {
        "torch": str(torch.__version__),
        "device": trainer.device.type,
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "optimizer": OPTIMIZERS.facts(settings.optimizer).spec.text,
        **{name: str(getattr(settings, name)) for name in _SETTINGS},
    }


def _notes(trainer: Resumable, manifest: Checkpoint, now: dict[str, str], *, exact: bool) -> list[str]:
    notes = []
    for what, is_now in now.items():
        was = manifest.conditions.get(what, is_now)
        if was != is_now:
            follows = (
                "the rates and options of the checkpoint are put back" if what == "optimizer" else UNLIKE
            )
            notes.append(f"{what} was {was}, and is {is_now}: {follows}")
    if not exact:
        notes.append(
            f"{_told(manifest.laid_out)} resumes as {_told(laid_out(trainer))}: residuals and random states "
            f"start anew"
        )
    elif (otherwise := trainer.model.resumes_otherwise) is not None:
        notes.append(f"{otherwise}: {UNLIKE}")
    if trainer.settings.compile:
        notes.append(f"a compiled model may be compiled differently: {UNLIKE}")
    return notes


def _told(where: LaidOut) -> str:
    return f"{where.strategy} on {where.ranks} ranks ({where.compression}, {where.collective})"


def _unattached(trainer: Resumable, state: RankState) -> list[str]:
    kept = state.shared["attached"]
    return [
        *(
            f"it has the state of {name!r}, which is not attached"
            for name in kept.keys() - trainer.attached.keys()
        ),
        *(f"it has no state of {name!r}: that starts anew" for name in trainer.attached.keys() - kept.keys()),
    ]


@dataclass(frozen=True, slots=True)
class _Write:
    """Write one checkpoint from memory to the disk; collective, on any thread."""

    _ranks: Ranks
    _run: RunFolder
    _temporary: Path
    _state: RankState
    _manifest: Checkpoint
    _keep: int | None

    def __call__(self) -> Path:
        """Raises StoreError, on all ranks, if one of them cannot write."""
        try:
            return self._whole()
        except StoreError as error:
            # On all ranks: if they do not share the folder, each has its own.
            shutil.rmtree(self._temporary, ignore_errors=True)
            if isinstance(error, SystemRefusedError):
                raise StoreError(f"{error}; {advice(self._run.path)}") from error
            raise

    def _whole(self) -> Path:
        rank = self._ranks.rank
        self._ranks.agree(self._require_finite)
        prefix = f"replicas/{rank}/" if self._manifest.own_replicas else ""
        tensors = {
            f"{prefix}parameters/{name}": boxes for name, boxes in by_name(self._state.parameters).items()
        }
        for key, values in self._state.optimizer.items():
            tensors |= {f"{prefix}optimizer/{key}/{name}": boxes for name, boxes in by_name(values).items()}
        blobs = {f"shared/{rank}": dumped(self._state.shared), f"own/{rank}": dumped(self._state.own)}
        planner = BoxSavePlanner(tensors, blobs)
        writer = FileSystemWriter(self._temporary, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(rank == 0)
        plans = self._ranks.together(lambda: writer.prepare_local_plan(planner.create_local_plan()))
        # Every rank makes the same global plan from the same local plans.
        everyone, metadata = planner.create_global_plan(plans)
        plan = planner.finish_plan(writer.prepare_global_plan(everyone)[rank])
        answers = self._ranks.together(lambda: self._write(writer, planner, plan))
        files = {name: found for _, sums in answers for name, found in sums.items()}
        return self._ranks.from_first(
            lambda: self._finish(writer, metadata, [each for each, _ in answers], files)
        )

    def _require_finite(self) -> None:
        values = [(box.name, value) for box, value in self._state.parameters.items()]
        for key, moments in self._state.optimizer.items():
            values += [(f"{key} of {box.name}", value) for box, value in moments.items()]
        # An infinity in a buffer may be a mask.
        buffers = self._state.shared["buffers"]
        values += [(f"buffer {name}", value[~value.isinf()]) for name, value in buffers.items()]
        for name, value in values:
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise StoreError(
                    f"{name} is not finite after step {self._manifest.step}: the last checkpoint stays; "
                    f"resume from it with clip_norm, or lower the rate in trainer.optimizer.param_groups and "
                    f"its schedule after resume, which puts back the checkpoint's rate"
                )

    def _write(
        self, writer: FileSystemWriter, planner: BoxSavePlanner, plan: Any
    ) -> tuple[Any, dict[str, FileSum]]:
        results = writer.write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        return results, {name: sum_of(self._temporary / name) for name in names}

    def _finish(
        self, writer: FileSystemWriter, metadata: Any, results: Any, files: dict[str, FileSum]
    ) -> Path:
        self._require_here(files)
        writer.finish(metadata, results)
        files[METADATA] = sum_of(self._temporary / METADATA)
        path = self._run.finish(self._temporary, msgspec.structs.replace(self._manifest, files=files))
        # The checkpoint is valid now, even if old ones cannot be removed: the next save tries again.
        with suppress(OSError):
            self._run.forget(self._keep)
        return path

    def _require_here(self, files: dict[str, FileSum]) -> None:
        """Raise StoreError if rank 0 does not see a file that another rank has written."""
        refresh(self._temporary)
        for name, written in files.items():
            path = self._temporary / name
            if not path.exists() or path.stat().st_size != written.bytes:
                raise StoreError(
                    f"{path} was written by another rank and is not here: all ranks must reach "
                    f"{self._run.path.resolve()} on one shared file system"
                )


def by_name(boxes: dict[Box, Tensor]) -> dict[str, dict[Box, Tensor]]:
    found: dict[str, dict[Box, Tensor]] = {}
    for box, value in boxes.items():
        found.setdefault(box.name, {})[box] = value
    return found
