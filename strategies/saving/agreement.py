"""Agreement of ranks: every rank gets the result or the error of any rank before they branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from results.errors import BenchError, StoreError
from strategies.collectives.link import Link
from strategies.training.gathered import gathered_objects

T = TypeVar("T")


class SystemRefusedError(StoreError):
    """The operating system refused to read or write: a full disk, a lost file."""


class Ranks:
    """The ranks of a run, which agree over a link."""

    def __init__(self, link: Link | None, device: torch.device) -> None:
        """`device` is a device that the link can send from."""
        self._link, self._device = link, device
        self.rank = 0 if link is None else link.rank

    def gather(self, value: T) -> list[T]:
        return [value] if self._link is None else gathered_objects(value, self._link, self._device)

    def agree(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's result. If it fails on a rank, all ranks raise the
        error of the first such rank; only that rank has the error's cause."""
        value, failure = _attempt(work)
        for rank, error in enumerate(self.gather(failure)):
            if error is not None:
                raise failure if rank == self.rank and failure is not None else error
        return cast(T, value)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results; raise as `agree` does."""
        return self.gather(self.agree(work))

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and broadcast its result, or its exception, to all ranks."""
        return cast(T, self.together(lambda: work() if self.rank == 0 else None)[0])


def _attempt(work: Callable[[], T]) -> tuple[T | None, BenchError | None]:
    try:
        return work(), None
    except BenchError as error:
        return None, error
    except Exception as error:  # the other ranks wait for this one
        refused = _refused(error)
        failure = (
            StoreError(f"{type(error).__name__}: {error}")
            if refused is None
            else SystemRefusedError(f"{refused.filename or 'the folder'}: {refused.strerror or refused}")
        )
        failure.__cause__ = error
        return None, failure


def _refused(error: BaseException | None) -> OSError | None:
    """Return the error of the operating system, which torch's writer turns into a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
