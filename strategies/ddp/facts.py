"""The facts of `ddp`, without torch, and a base class of the strategies that have its buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from results.cell import DEFAULT_COLLECTIVE, UNCOMPRESSED, Cell
from results.parts import VALUE_BYTES, ModelParts
from results.spec import Option
from strategies.advice import WITH_UNUSED
from strategies.closed_form.moments import Footprint, step_moments
from strategies.closed_form.terms import MIB, Piece, Term, gradients_ready, term
from strategies.facts import AutoPoint, Proposal, StrategyFacts

BUCKET_MB = Option(
    kind="float",
    default=25.0,
    minimum=0.001,
    help="MiB of gradients in one exchange",
    tuned=("25", "5", "100"),
)
UNUSED = Option(kind="bool", default=False, help="look for parameters that a forward did not use")
TORCHS_BUCKET_MB, TORCHS_FIRST_MB = 25.0, 1.0
"""torch's default size, and the size of its first bucket if the size is the default."""


class BucketedFacts(StrategyFacts):
    """Replicas whose gradients are averaged in buckets during backward."""

    bucket_copies = 1
    projected = True

    @property
    def first_bucket_mb(self) -> float:
        """The size in MiB of the bucket that is full first."""
        mib = self.spec.number("bucket_mb")
        return TORCHS_FIRST_MB if mib == TORCHS_BUCKET_MB else mib

    @property
    def in_buckets(self) -> bool:
        """Whether gradients are views of the buckets."""
        return False

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        return step_moments(*self.whole_model(cell, parts), in_buckets=self.in_buckets)

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        buckets = tuple(self._buckets(parts.trained))
        gradients = term(
            "gradients",
            "all-reduce",
            ("replicate", cell.gpus),
            payload=VALUE_BYTES * parts.trained.values,
            operations=len(buckets),
            overlap="last backward",
        )
        yield replace(gradients, pieces=buckets)

    def _buckets(self, trained: ModelParts) -> Iterator[Piece]:
        """Yield the buckets that gradients fill, in the reverse order of registration."""
        limit, held = self.first_bucket_mb * MIB, 0
        for size, share in gradients_ready(trained):
            held += size
            if held >= limit:
                yield Piece(held, share)
                limit, held = self.spec.number("bucket_mb") * MIB, 0
        if held:
            yield Piece(held, 1.0)


class Ddp(BucketedFacts):
    """It needs the memory of `single` and P bytes of buckets (P: all parameters); with `bucket_view` the
    gradients are in the buckets."""

    name = "ddp"
    help = "torch's DistributedDataParallel: replicas, bucketed all-reduce during backward"
    options = MappingProxyType(
        {
            "bucket_mb": BUCKET_MB,
            "static_graph": Option(
                kind="bool", default=False, help="promise torch that the graph never changes"
            ),
            "bucket_view": Option(
                kind="bool",
                default=False,
                help="gradients are views of the buckets: one copy less",
                tuned=("false", "true"),
            ),
            "find_unused": UNUSED,
        }
    )
    model = "strategies.ddp.model:DdpModel"
    takes_ddp_hooks = True

    def refusal(self, cell: Cell) -> str | None:
        if self.spec.flag("static_graph") and cell.accumulation > 1:
            return (
                f"ddp:static_graph=true needs --accumulation 1, not {cell.accumulation}: torch exchanges "
                f"gradients in the first backward pass"
            )
        if self.spec.flag("find_unused") and not cell.dense:
            return (
                f"{self.name}:find_unused=true needs --compression {UNCOMPRESSED} and --collective "
                f"{DEFAULT_COLLECTIVE}: torch exchanges which parameters were used while our exchange "
                f"is under way; use {WITH_UNUSED[-1]}"
            )
        return None

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        yield Proposal(strategy="ddp", complexity=(1,))

    @property
    def in_buckets(self) -> bool:
        return self.spec.flag("bucket_view")
