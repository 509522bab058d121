"""The facts of a compressor, without torch: the collective that it needs, its residual, its precision."""

from __future__ import annotations

from typing import ClassVar, Literal

from results.cell import Cell
from results.registry import CatalogFacts
from results.spec import Option
from strategies.compression.promise import CompressorPromise, Largest, LargestOfBlocks

Need = Literal["all-reduce", "all-gather", "all-to-all"]
"""The collective that a compressor calls; one that needs an all-to-all calls an all-gather after it."""

UNIT_ROUNDOFF = 2.0**-24
ROUNDINGS = 256
"""Roundings in single precision of one value: compensating, compressing, summing and rebuilding it."""

RATIO = Option(kind="float", minimum=1e-6, maximum=1.0, help="the share that is sent", example="0.01")
RANK = Option(kind="int", minimum=1, maximum=1024, help="the rank of the approximation", example="4")
SELECT = Option(
    kind="str",
    default="exact",
    choices=("exact", "sampled", "block"),
    help="how the largest are found: all of them, by a threshold from a sample, or one of each block",
)
FEEDBACK = Option(kind="bool", default=True, help="add the residual, what was not sent, to the next gradient")
WARMUP = Option(kind="int", default=0, minimum=0, help="first steps, which send more than later ones")


def share_of(values: int, ratio: float) -> int:
    """Return the number of values that a ratio in (0, 1] means: at least one."""
    return max(1, round(ratio * values))


class CompressorFacts(CatalogFacts):
    """The facts of one compressor with its options."""

    compressor: ClassVar[str] = ""
    """The `Compressor`, as `package.module:Class`, built by its `of`; imported only on a rank."""
    ddp_hook: ClassVar[str | None] = None
    """A hook of torch's DistributedDataParallel instead of a `Compressor`, as `package.module:Class`."""
    places = ("compressor", "ddp_hook")
    need: ClassVar[Need] = "all-reduce"
    keeps_residual: ClassVar[bool] = True
    """Whether a residual may be kept for a later step."""
    instead: ClassVar[str] = ""
    """The compressor to use where this one is refused."""
    whole_matrices: ClassVar[bool] = False
    """Whether it cannot compress a shard of a bucket."""
    gradients_alone: ClassVar[str | None] = None
    """Why it cannot compress differences of parameters; None: it can."""
    own_gradients_alone: ClassVar[str | None] = None
    """Why a rank cannot send for others; None: it can."""

    @classmethod
    def missing(cls) -> list[str]:
        return super().missing() + ([] if cls.compressor or cls.ddp_hook else ["compressor"])

    def refusal(self, cell: Cell) -> str | None:
        """Return why its own rules refuse a cell, as a sentence; None if they do not."""
        return None

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        """The promises that the proof checks on each exchange, in addition to the law of conservation."""
        return ()

    def count_sent(self, values: int, before: int) -> int:
        """Return the number of values that a rank sends, at least one, for compressors that send a share of
        them. `before`: exchanges of the bucket so far."""
        return share_of(values, self.spec.ratio)

    def largest_sent(self) -> CompressorPromise:
        """Return the promise of the option `select`: how large the selected values are.

        `sampled` aims at 1.3 times as many candidates as values are sent. It finds fewer than half of its aim
        with a probability below 1e-5, because their number has a standard deviation of at most 0.14 of the
        aim.
        """
        if self.spec.word("select") == "block":
            return LargestOfBlocks(count=self.count_sent)
        return Largest(count=self.count_sent, part=0.5 if self.spec.word("select") == "sampled" else 1.0)

    def law_tolerance(self, ranks: int) -> float:
        """Return the allowed difference between both sides of the law of conservation, relative to its
        terms."""
        return ROUNDINGS * UNIT_ROUNDOFF
