"""What `bench check` asks of its ranks, and the report that they write. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from results.parts import ModelParts

RANKS = 2
LONGEST_S = 600.0
"""The time limit of a check; the ranks are ended after it."""

Verdict = Literal["proven", "runs", "refused", "failed"]


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is checked."""

    workload: str
    """Spec text."""
    micro_batch: int
    optimizer: str
    source_folder: str
    strategies: tuple[str, ...]
    """The strategies that are asked. They are proven one after another while that takes little time, and the
    first that can in any case."""
    parts: bool = False
    """Whether planning asks: the parts of the model are counted without memory, and nothing is trained."""


class StrategyWord(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy says of a workload."""

    strategy: str
    verdict: Verdict
    words: str


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks found, as far as they came."""

    failure: str | None = None
    """Why the workload does not train; what comes after it is not known."""
    module: str = ""
    parameters: int = 0
    trained: int = 0
    """Parameters that are trained."""
    parameter_bytes: int = 0
    trained_bytes: int = 0
    """Of the parameters that are trained: as many as their gradients have."""
    blocks: tuple[str, ...] = ()
    """Units of sharding and activation checkpointing, by the layout or as they are found."""
    batch: tuple[str, ...] = ()
    """Each tensor of a batch, with its type and shape."""
    loss: float | None = None
    step_s: float | None = None
    """Of one rank, on CPU: its second step."""
    activation_bytes: int | None = None
    """That autograd keeps of one micro-batch."""
    optimizer_bytes: int | None = None
    flops: int | None = None
    """Of forward and backward of one sample."""
    parts: ModelParts | None = None
    splits: bool | None = None
    """Whether a layout names layers that tensor parallelism can split; None: the model could not be built to
    count its parts."""
    notes: tuple[str, ...] = ()
    """Sentences that a user of this workload should read."""
    uncut: str | None = None
    """Why no pipeline can be made of the model; None: one can, or it is not known."""
    absent: dict[str, str] = msgspec.field(default_factory=dict)
    """What is not known, with the reason."""
    strategies: tuple[StrategyWord, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether it trains, and no strategy that goes on fails."""
        return self.failure is None and all(word.verdict != "failed" for word in self.strategies)
