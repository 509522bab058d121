"""A workload from another package: a small vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929).

Images are cut into patches; blocks are GPT-2's with attention over all of them, and the mean over the patches
is classified. Planning imports this file, and must not import torch: the model is made inside of `build_vit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from results.layout import LinearSplit, ModelLayout, splits_of
from results.parts import VALUE_BYTES, ModelParts, Part, Saved, Weight
from workloads.activations import INDEX_BYTES, SCALAR, linear, saved
from workloads.catalog import Member
from workloads.datasets.facts import fit_images
from workloads.shape import Shape, WorkloadFacts

if TYPE_CHECKING:
    from torch import Tensor

    from workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ViTShape(Shape):
    """Images of (3, px, px) in patches of (patch, patch)."""

    layers: int
    width: int
    heads: int
    px: int
    patch: int
    classes: int

    @property
    def patches(self) -> int:
        return (self.px // self.patch) ** 2

    def facts(self) -> WorkloadFacts:
        return WorkloadFacts(
            family="vit",
            builder="vit:build_vit",
            unit="images",
            units_per_sample=1,
            parts=self.parts(),
            heads=(self.heads,),
            batch_norm=False,
            minimum_batch=1,
            memory_formats=("contiguous", "channels_last"),
            datasets=fit_images(shape=(3, self.px, self.px), classes=self.classes),
        )

    def parts(self) -> ModelParts:
        """As GPT-2's: 12 d^2 + 13 d parameters and 24 t d^2 + 4 t^2 d FLOPs a block, for t patches."""
        t, d, classes = self.patches, self.width, self.classes
        pixels, image = 3 * self.patch**2, 3 * self.px**2
        norm = (Weight(rows=d), Weight(rows=d))
        block = Part(
            weights=(
                *norm,
                *linear(d, 3 * d, by="outputs"),
                *linear(d, d, by="inputs"),
                *norm,
                *linear(d, 4 * d, by="outputs"),
                *linear(4 * d, d, by="inputs"),
            ),
            saved=saved(whole=4 * t * d + 4 * t, split=12 * t * d + t * self.heads),
            products=saved(whole=2 * t * d, split=8 * t * d + t * self.heads),
            input=VALUE_BYTES * t * d,
            flops=24 * t * d**2 + 4 * t**2 * d,
        )
        return ModelParts(
            stem=Part(
                weights=(Weight(rows=d, columns=pixels), Weight(rows=d), Weight(rows=t, columns=d)),
                saved=saved(whole=image),
                input=VALUE_BYTES * image,
                flops=2 * t * d * pixels,
            ),
            blocks=(block,) * self.layers,
            head=Part(
                weights=(*norm, Weight(rows=classes, columns=d), Weight(rows=classes)),
                # The last norm's input with its statistics, the mean, and the logarithms of probabilities.
                saved=Saved(whole=VALUE_BYTES * (t * d + 2 * t + d + classes) + INDEX_BYTES),
                saved_once=SCALAR,
                input=VALUE_BYTES * t * d,
                flops=2 * d * classes,
            ),
            logits=VALUE_BYTES * classes,
        )


def build_vit(shape: ViTShape) -> Workload:
    """The classifier with its cross-entropy, for images (n, 3, px, px)."""
    from torch import nn
    from torch.nn import functional as F

    from workloads.gpt.model import Attention, Block, initialise
    from workloads.workload import ImageInput, Workload

    class OverAll(Attention):
        """Attention of each patch over all of them."""

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (self._split(part) for part in self.c_attn(x).chunk(3, dim=2))
            mixed = F.scaled_dot_product_attention(query, key, value)
            y: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
            return y

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Conv2d(3, shape.width, shape.patch, stride=shape.patch)
            self.places = nn.Embedding(shape.patches, shape.width)
            self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))  # type: ignore[arg-type]
            for block in self.h:
                block.attn = OverAll(shape)  # type: ignore[arg-type]
            self.norm = nn.LayerNorm(shape.width)
            self.classify = nn.Linear(shape.width, shape.classes)
            initialise(self, layers=shape.layers, added=("c_proj",))

        def forward(self, images: Tensor) -> Tensor:
            x = self.stem(images)
            for block in self.h:
                x = block(x)
            return self.head(x)

        def stem(self, images: Tensor) -> Tensor:
            """Images to what the first block takes, (n, patches, width)."""
            x: Tensor = self.cut(images).flatten(2).transpose(1, 2) + self.places.weight
            return x

        def head(self, x: Tensor) -> Tensor:
            """What the last block gives to logits (n, classes)."""
            y: Tensor = self.classify(self.norm(x).mean(dim=1))
            return y

    takes = ImageInput(shape=(3, shape.px, shape.px), classes=shape.classes)
    blocks = tuple(f"h.{layer}" for layer in range(shape.layers))
    splits = (
        LinearSplit(name="attn.c_attn", by="outputs", parts=3),
        LinearSplit(name="attn.c_proj", by="inputs"),
        LinearSplit(name="mlp.c_fc", by="outputs"),
        LinearSplit(name="mlp.c_proj", by="inputs"),
    )
    layout = ModelLayout(
        blocks=blocks,
        stem=("cut", "places"),
        head=("norm", "classify"),
        sample=takes.shape,
        splits=splits_of(blocks, splits),
        heads=tuple(f"{block}.attn.heads" for block in blocks),
    )
    return Workload(
        module=ViT(),
        loss=F.cross_entropy,
        synthetic=takes.synthetic,
        unit="images",
        layout=layout,
        input=takes,
    )


VIT = Member(
    name="vit-nano",
    help="vision transformer of 4 layers and width 64 on 32 x 32 pixels",
    shape=ViTShape(layers=4, width=64, heads=4, px=32, patch=8, classes=10),
    batch=8,
    optimizer="adamw:lr=0.001",
    fixed=True,
)
