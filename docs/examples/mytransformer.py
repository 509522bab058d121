"""A small transformer with a layout, so that strategies can cut it into stages or split its layers.

In this folder: bench matrix --workload py:mytransformer:build --gpus 2 --strategy pipeline:1f1b,tp
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from results.layout import LinearSplit, ModelLayout, splits_of
from workloads import Workload


class Block(nn.Module):
    """Attention and an MLP, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block(width=32, heads=4) for _ in range(4))
        self.out = nn.Linear(32, 1)

    def stem(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def head(self, x: Tensor) -> Tensor:
        return self.out(x.mean(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Workload:
    blocks = tuple(f"blocks.{index}" for index in range(4))
    of_a_block = (
        LinearSplit(name="qkv", by="outputs", parts=3),
        LinearSplit(name="mix", by="inputs"),
        LinearSplit(name="up", by="outputs"),
        LinearSplit(name="down", by="inputs"),
    )
    layout = ModelLayout(
        blocks=blocks,
        stem=("embed",),
        head=("out",),
        sample=(16, 8),  # tokens of 8 numbers; sample_type is float32 by default
        splits=splits_of(blocks, of_a_block),
        heads=tuple(f"{block}.heads" for block in blocks),
    )

    def synthetic(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, 16, 8, generator=generator)
        return x, x.mean(dim=(1, 2))[:, None]

    return Workload(module=Model(), loss=F.mse_loss, synthetic=synthetic, layout=layout)
