"""Saving the state of all ranks to a folder, beside training if asked for, and going on from it.

Ranks agree before they branch: whatever one of them finds (a full disk, a torn file, another model) all of
them know before the next message, so that they do the same.
"""

from __future__ import annotations

import secrets
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from results.checkpoint import Checkpoint, FileSum
from results.errors import BenchError, NewerSchemaError, SchemaError, StoreError, UsageError
from strategies.collectives.link import Link
from strategies.saving.planners import BoxSavePlanner
from strategies.saving.reading import read_state
from strategies.saving.run_folder import METADATA, Kept, RunFolder, advice, best_of, sum_of, torn
from strategies.saving.state import RankState, dumped, laid_out, restore, state_of, tensors_of
from strategies.saving.whole import replicas_differ
from strategies.training.boxes import Box
from strategies.training.gathered import gathered_objects

if TYPE_CHECKING:
    from strategies.training.trainer import Trainer

T = TypeVar("T")
CPU = torch.device("cpu")


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written, or training does not go on from it bit for bit."""


class Ranks:
    """The ranks of a run, over a link of their own that a thread beside training may use."""

    def __init__(self, link: Link | None) -> None:
        """Collective."""
        self._link = None if link is None else link.beside()
        self.rank = 0 if link is None else link.rank

    def gather(self, value: T) -> list[T]:
        return [value] if self._link is None else gathered_objects(value, self._link, CPU)

    def agree(self, work: Callable[[], T]) -> T:
        """What `work` gives on this rank. Raises on all ranks what it raises on the first that fails."""
        value, failure = _attempt(work)
        for error in self.gather(failure):
            if error is not None:
                raise error
        return cast(T, value)

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank; raises as `agree` does."""
        return self.gather(self.agree(work))

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, which alone calls it; raises on all ranks what it raises there."""
        return cast(T, self.together(lambda: work() if self.rank == 0 else None)[0])


def _attempt(work: Callable[[], T]) -> tuple[T | None, BenchError | None]:
    try:
        return work(), None
    except BenchError as error:
        return None, error
    except OSError as error:
        return None, StoreError(f"{error.filename or 'the folder'}: {error.strerror or error}")
    except Exception as error:  # the other ranks wait for a word of this one
        return None, StoreError(f"{type(error).__name__}: {error}")


class Saving:
    """A checkpoint on its way to the disk."""

    def __init__(self, written: Future[Path]) -> None:
        self._written = written
        self._told = False

    def wait(self) -> Path | None:
        """The checkpoint's folder, when all ranks have written it; None on all of them, with a
        CheckpointWarning, if it could not be written."""
        failure = self._written.exception()
        if failure is None:
            return self._written.result()
        if not isinstance(failure, StoreError):
            raise failure
        if not self._told:
            self._told = True
            warnings.warn(f"no checkpoint: {failure}; training goes on", CheckpointWarning, stacklevel=3)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What training goes on from."""

    path: Path
    step: int
    exact: bool
    """Whether each rank goes on as the same rank of the same layout."""
    notes: tuple[str, ...]
    """Why training need not go on bit for bit, a sentence each; nothing where it does."""


class Checkpoints:
    """The checkpoints of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        """Collective."""
        self._trainer = trainer
        self._ranks = Ranks(trainer.link)
        self._session = self._ranks.gather(secrets.token_hex(8))[0]
        self._known: set[tuple[int, str]] = set()
        """Step and session of the checkpoints that this trainer has written or gone on from."""
        self._under_way: Saving | None = None
        self._thread: ThreadPoolExecutor | None = None

    def save(self, folder: Path, *, keep: int | None, metric: float | None, asynchronous: bool) -> Saving:
        if keep is not None and keep < 1:
            raise UsageError(f"keep is at least 1 (the last checkpoint), not {keep}")
        if self._under_way is not None:
            self._under_way.wait()
        run, trainer = RunFolder(folder), self._trainer
        done: Future[Path] = Future()
        saving = Saving(done)
        known = run.place(trainer.steps)
        if (trainer.steps, self._session) in self._known and self._ranks.gather(known.exists())[0]:
            done.set_result(known)
            return saving
        try:
            temporary = self._ranks.from_first(lambda: run.begin(trainer.steps, self._session, self._known))
        except StoreError as error:
            done.set_exception(error)
            saving.wait()
            return saving
        share = self._share()
        state = self._ranks.agree(lambda: state_of(trainer, share))
        write = _Write(self._ranks, run, temporary, state, self._manifest(trainer, metric), keep)
        self._under_way = saving
        if not asynchronous:
            _settle(done, write)
            saving.wait()
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._thread.submit(_settle, done, write)
        # One that was not written is not there either: to go on after it is no other run.
        self._known.add((trainer.steps, self._session))
        return saving

    def _share(self) -> set[tuple[str, str]]:
        """The rectangles that this rank copies and writes: of those that several ranks have one does, the one
        with the fewest bytes so far."""
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

    def _manifest(self, trainer: Trainer, metric: float | None) -> Checkpoint:
        finite = metric is not None and metric == metric and abs(metric) != float("inf")
        return Checkpoint(
            step=trainer.steps,
            session=self._session,
            laid_out=laid_out(trainer),
            optimizer=type(trainer.model.local_optimizer(trainer.optimizer)).__name__,
            own_replicas=replicas_differ(trainer.settings.strategy),
            conditions=conditions(trainer),
            files={},
            metric=float(metric) if finite and metric is not None else None,
        )

    def resume(self, folder: Path, step: int | str | None) -> Resumed | None:
        if self._under_way is not None:
            self._under_way.wait()
        kept = self._choose(RunFolder(folder), step)
        if kept is None:
            return None
        trainer, manifest = self._trainer, kept.manifest
        mine = laid_out(trainer)
        exact = manifest.laid_out == mine
        self._ranks.agree(lambda: self._require_possible(manifest))
        state = self._ranks.agree(lambda: read_state(trainer, kept, self._ranks.rank, exact=exact))
        restore(trainer, state, exact=exact)
        self._known.add((manifest.step, manifest.session))
        notes = (*_notes(trainer, manifest, exact=exact), *_unattached(trainer, state))
        for note in notes if self._ranks.rank == 0 else ():
            warnings.warn(f"{kept.path}: {note}", CheckpointWarning, stacklevel=4)
        return Resumed(path=kept.path, step=manifest.step, exact=exact, notes=notes)

    def _require_possible(self, manifest: Checkpoint) -> None:
        kind = type(self._trainer.model.local_optimizer(self._trainer.optimizer)).__name__
        if kind != manifest.optimizer:
            raise UsageError(
                f"the checkpoint was trained by {manifest.optimizer}, and this trainer has {kind}: use the "
                f"same optimizer, or start from the parameters alone (export)"
            )

    def _choose(self, run: RunFolder, step: int | str | None) -> Kept | None:
        """The newest checkpoint of which all files are what was written, or the one that was asked for."""
        for path in self._ranks.from_first(lambda: _candidates(run, step)):
            try:
                return self._verified(run, path)
            except NewerSchemaError:
                raise
            except (SchemaError, StoreError) as error:
                if step is not None:
                    raise
                if self._ranks.rank == 0:
                    warnings.warn(
                        f"{path} is not whole: {error}; going on from an earlier one",
                        CheckpointWarning,
                        stacklevel=5,
                    )
        if self._ranks.from_first(lambda: any(run.path.glob("step-*"))):
            raise StoreError(
                f"{run.path} has no checkpoint that is whole: resume from a copy, or save elsewhere"
            )
        return None

    def _verified(self, run: RunFolder, path: Path) -> Kept:
        """Each rank looks at its share of the files. Raises SchemaError if one is not what was written."""
        kept = self._ranks.from_first(lambda: run.read(path))
        files = kept.manifest.files
        size = self._trainer.link.size if self._trainer.link is not None else 1

        def look() -> None:
            wrong = torn(path, files, sorted(files)[self._ranks.rank :: size])
            if wrong is not None:
                raise SchemaError(wrong)

        self._ranks.agree(look)
        return kept


def _settle(done: Future[Path], write: Callable[[], Path]) -> None:
    try:
        done.set_result(write())
    except BaseException as error:  # whoever waits for it is told
        done.set_exception(error)


def _candidates(run: RunFolder, step: int | str | None) -> list[Path]:
    if step is None:
        return sorted(run.path.glob("step-*"), reverse=True)
    if step == "best":
        best = best_of(run.kept())
        if best is None:
            raise StoreError(f"{run.path} has no checkpoint with a metric: give save(..., metric=...)")
        return [best.path]
    assert isinstance(step, int)
    if not run.place(step).exists():
        there = ", ".join(str(kept.manifest.step) for kept in run.kept()) or "none"
        raise StoreError(f"{run.path} has no checkpoint of step {step}; those that are whole: {there}")
    return [run.place(step)]


def conditions(trainer: Trainer) -> dict[str, str]:
    """What the bits of a step follow from beside the layout."""
    return {
        "torch": str(torch.__version__),
        "device": trainer.device.type,
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def _notes(trainer: Trainer, manifest: Checkpoint, *, exact: bool) -> list[str]:
    notes = [
        f"{what} was {manifest.conditions[what]}, and is {now}: what follows need not be bit for bit"
        for what, now in conditions(trainer).items()
        if manifest.conditions.get(what, now) != now
    ]
    if not exact:
        was, now_is = manifest.laid_out, laid_out(trainer)
        notes.append(
            f"{was.strategy} on {was.ranks} ranks ({was.compression}) goes on as {now_is.strategy} on "
            f"{now_is.ranks} ({now_is.compression}): residuals and random states start anew"
        )
    if trainer.settings.compile:
        notes.append("a compiled model may be compiled otherwise: what follows need not be bit for bit")
    return notes


def _unattached(trainer: Trainer, state: RankState) -> list[str]:
    kept = state.shared["attached"]
    return [
        *(
            f"it has the state of {name!r}, which is not attached"
            for name in kept.keys() - trainer.attached.keys()
        ),
        *(f"it has no state of {name!r}: that starts anew" for name in trainer.attached.keys() - kept.keys()),
    ]


class _Write:
    """One checkpoint from memory to the disk; collective, on whatever thread."""

    def __init__(
        self,
        ranks: Ranks,
        run: RunFolder,
        temporary: Path,
        state: RankState,
        manifest: Checkpoint,
        keep: int | None,
    ) -> None:
        self._ranks, self._run, self._temporary = ranks, run, temporary
        self._state, self._manifest, self._keep = state, manifest, keep

    def __call__(self) -> Path:
        """Raises StoreError, on all ranks, if one of them cannot write."""
        try:
            return self._whole()
        except StoreError as error:
            if self._ranks.rank == 0:
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise StoreError(f"{error}; {advice(self._run.path)}") from error

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
        # Every rank makes the same global plan of the same local ones.
        everyone, metadata = planner.create_global_plan(plans)
        plan = planner.finish_plan(writer.prepare_global_plan(everyone)[rank])
        answers = self._ranks.together(lambda: self._write(writer, planner, plan))
        files = {name: found for _, sums in answers for name, found in sums.items()}
        return self._ranks.from_first(
            lambda: self._finish(writer, metadata, [each for each, _ in answers], files)
        )

    def _require_finite(self) -> None:
        for box, value in self._state.parameters.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise StoreError(
                    f"{box.name} is not finite after step {self._manifest.step}: the last checkpoint stays; "
                    f"resume from it with a lower learning rate, or with clip_norm"
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
        writer.finish(metadata, results)
        files[METADATA] = sum_of(self._temporary / METADATA)
        path = self._run.finish(self._temporary, msgspec.structs.replace(self._manifest, files=files))
        self._run.forget(self._keep)
        return path


def by_name(boxes: dict[Box, Tensor]) -> dict[str, dict[Box, Tensor]]:
    found: dict[str, dict[Box, Tensor]] = {}
    for box, value in boxes.items():
        found.setdefault(box.name, {})[box] = value
    return found
