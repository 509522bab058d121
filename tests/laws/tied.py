"""A tiny model for every strategy: blocks between an embedding and a head that share a matrix."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from results.layout import LinearSplit, ModelLayout

WIDTH, TOKENS = 6, 11


class Tied(nn.Module):
    """Tokens to logits. A block of `block(width)` has linear layers `up` and `down`, of which the latter is
    added to what came in."""

    def __init__(self, block: Callable[[int], nn.Module], blocks: int) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.last.weight = self.embed.weight
        self.blocks = nn.ModuleList([block(WIDTH) for _ in range(blocks)])

    def stem(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def head(self, x: Tensor) -> Tensor:
        return self.last(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied_layout(blocks: int, *, length: int) -> ModelLayout:
    """Parts of a `Tied` whose samples have `length` tokens."""
    names = tuple(f"blocks.{block}" for block in range(blocks))
    return ModelLayout(
        stem=("embed",),
        blocks=names,
        head=("last", "embed"),
        sample=(length,),
        sample_type="int64",
        splits=tuple(
            split
            for name in names
            for split in (
                LinearSplit(name=f"{name}.up", by="outputs"),
                LinearSplit(name=f"{name}.down", by="inputs"),
            )
        ),
    )


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
