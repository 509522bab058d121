"""Request of `bench check` to its ranks, and the report that they write; torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from results.parts import ModelParts

RANKS = 2
LONGEST_S = 600.0
"""The time limit of a check; the ranks are ended after it."""

Verdict = Literal["proven", "runs", "refused", "failed"]


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Workload that is checked, and how."""

    workload: str
    """Spec text of the workload."""
    micro_batch: int
    optimizer: str
    dataset: str | None = None
    """Spec text of the data set; None: synthetic samples, or own data where the workload draws none."""
    source_folder: str
    strategies: tuple[str, ...]
    """Strategies to try. They are proven one after another while that takes little time, and the first that
    can be proven in any case."""
    parts: bool = False
    """Whether planning asks: the parts of the model are counted without memory, and no step is taken."""


class StrategyWord(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a workload under one strategy."""

    strategy: str
    verdict: Verdict
    words: str


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of the ranks, up to where they ended."""

    failure: str | None = None
    """Why the workload does not train; the fields after it are then not known."""
    module: str = ""
    parameters: int = 0
    trained: int = 0
    """Number of parameters that are trained."""
    parameter_bytes: int = 0
    trained_bytes: int = 0
    """Bytes of the parameters that are trained, and of their gradients."""
    blocks: tuple[str, ...] = ()
    """Units of sharding and activation checkpointing, by the layout or as they are found."""
    batch: tuple[str, ...] = ()
    """Each tensor of a batch, with its type and shape."""
    loss: float | None = None
    step_s: float | None = None
    """Time of the second step of one rank, on CPU."""
    activation_bytes: int | None = None
    """Bytes that autograd keeps of one micro-batch."""
    optimizer_bytes: int | None = None
    flops: int | None = None
    """FLOPs of forward and backward of one sample."""
    parts: ModelParts | None = None
    splits: bool | None = None
    """Whether a layout names layers that tensor parallelism can split; None: the model could not be built to
    count its parts."""
    notes: tuple[str, ...] = ()
    """Sentences that a user of this workload should read."""
    uncut: str | None = None
    """Why no pipeline can be made of the model; None: one can, or it is not known."""
    absent: dict[str, str] = msgspec.field(default_factory=dict)
    """Fields that are not known, with the reason."""
    strategies: tuple[StrategyWord, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the workload trains, and no strategy failed."""
        return self.failure is None and all(word.verdict != "failed" for word in self.strategies)
