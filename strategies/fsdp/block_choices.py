"""The choices of `manual` for each block, read without torch: `manual:reshard.checkpoint*2+keep*2`.

Runs of blocks are joined by `+`, in the order of the forward pass. A run is `reshard` (whole parameters are
given up between forward and backward: ZeRO-3) or `keep` (they stay until backward is over: ZeRO-2), then
`.offload` (shards lie in host memory) and `.checkpoint` (activations are computed again in backward), then
`*N` for N blocks alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from results.errors import SpecError

_RUN = re.compile(r"(reshard|keep)((?:\.checkpoint|\.offload)*)(?:\*([1-9][0-9]{0,3}))?")
_GRAMMAR = "reshard or keep, then .checkpoint, .offload, *N, such as manual:reshard.checkpoint*2+keep*2"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChoice:
    """How one block is treated."""

    reshard: bool
    checkpoint: bool = False
    offload: bool = False

    @property
    def text(self) -> str:
        """The beginning of a run; equal choices have equal text."""
        first = "reshard" if self.reshard else "keep"
        return first + ".checkpoint" * self.checkpoint + ".offload" * self.offload


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Blocks in a row that are treated alike."""

    choice: BlockChoice
    blocks: int


def read_runs(text: str) -> list[BlockRun]:
    """The runs of a text, neighbours that are alike made one. Raises SpecError."""
    runs = [_read_run(run) for run in text.split("+")]
    return [
        BlockRun(choice=choice, blocks=sum(run.blocks for run in alike))
        for choice, alike in groupby(runs, key=lambda run: run.choice)
    ]


def canonical(text: str) -> str:
    """The one way to write what `text` means. Raises SpecError."""
    return "+".join(run.choice.text + (f"*{run.blocks}" if run.blocks > 1 else "") for run in read_runs(text))


def read_choices(text: str) -> list[BlockChoice]:
    """The choice for each block, in the order of the forward pass. Raises SpecError."""
    return [run.choice for run in read_runs(text) for _ in range(run.blocks)]


def _read_run(text: str) -> BlockRun:
    found = _RUN.fullmatch(text)
    if found is None:
        raise SpecError(f"{text!r} is not a run of blocks: manual takes {_GRAMMAR}")
    first, flags, count = found.groups()
    choice = BlockChoice(
        reshard=first == "reshard", checkpoint=".checkpoint" in flags, offload=".offload" in flags
    )
    return BlockRun(choice=choice, blocks=int(count or 1))
