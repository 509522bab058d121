"""The choices of `manual` for each block, read without torch: `manual:reshard.checkpoint*2+keep*2`.

Runs of blocks are joined by `+`, in the order of the forward pass. A run is `reshard` (gathered parameters
are freed between forward and backward: ZeRO-3) or `keep` (they stay until backward ends: ZeRO-2), then
`.offload` (shards are in host memory) and `.checkpoint` (activations are recomputed in backward), then `*N`
for N equal blocks.
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
    """The choices for one block."""

    reshard: bool
    checkpoint: bool = False
    offload: bool = False

    @property
    def text(self) -> str:
        """How the text of consecutive blocks with this choice begins; equal choices have equal text."""
        first = "reshard" if self.reshard else "keep"
        return first + ".checkpoint" * self.checkpoint + ".offload" * self.offload


def read_choices(text: str) -> list[BlockChoice]:
    """Return the choice for each block, in the order of the forward pass. Raises SpecError."""
    choices: list[BlockChoice] = []
    for run in text.split("+"):
        found = _RUN.fullmatch(run)
        if found is None:
            raise SpecError(f"{run!r} does not describe consecutive blocks: manual takes {_GRAMMAR}")
        first, flags, count = found.groups()
        choice = BlockChoice(
            reshard=first == "reshard", checkpoint=".checkpoint" in flags, offload=".offload" in flags
        )
        choices += [choice] * int(count or 1)
    return choices


def canonical(text: str) -> str:
    """Return the one way to write the choices of `text`: equal neighbours are one run. Raises SpecError."""
    runs = [(choice.text, len(list(alike))) for choice, alike in groupby(read_choices(text))]
    return "+".join(f"{choice}*{blocks}" if blocks > 1 else choice for choice, blocks in runs)
