"""A residual network's measures and closed forms: He et al. 2015, arXiv:1512.03385, table 1, with version
1.5's strides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from results.parts import VALUE_BYTES, ModelParts, Part, Saved, Weight
from results.spec import Option
from workloads.activations import INDEX_BYTES, SCALAR, saved
from workloads.datasets.facts import fit_images
from workloads.shape import Shape, WorkloadFacts


class Convolution(NamedTuple):
    """A square convolution without bias, followed by BatchNorm."""

    kernel: int
    inputs: int
    outputs: int
    px: int
    """The side of its output, in pixels."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Kernel, and BatchNorm's scale and shift."""
        kernel = Weight(rows=self.outputs, columns=self.inputs * self.kernel**2)
        return kernel, Weight(rows=self.outputs), Weight(rows=self.outputs)

    @property
    def flops(self) -> int:
        return 2 * self.kernel**2 * self.inputs * self.outputs * self.px**2

    @property
    def results(self) -> int:
        """Number of output values of one sample."""
        return self.outputs * self.px**2

    @property
    def statistics(self) -> int:
        """Bytes of BatchNorm's mean and 1 / deviation of each channel."""
        return VALUE_BYTES * 2 * self.outputs


class ResidualBlock(NamedTuple):
    """The convolutions of a residual block."""

    own: tuple[Convolution, ...]
    """The convolutions one after another."""
    beside: tuple[Convolution, ...]
    """The convolution of the shortcut, if the input and the result differ in size."""


@dataclass(frozen=True, kw_only=True)
class ResNetShape(Shape):
    """The measures of a residual network."""

    blocks: tuple[int, int, int, int]
    """Residual blocks of the four stages."""
    bottleneck: bool
    px: int = 224
    classes: int = 1000

    @property
    def expansion(self) -> int:
        """Channels that leave a block, in multiples of its width."""
        return 4 if self.bottleneck else 1

    @property
    def features(self) -> int:
        """Channels that the classifier sees."""
        return 512 * self.expansion

    @property
    def options(self) -> Mapping[str, Option]:
        return MappingProxyType(
            {
                "px": Option(kind="int", default=self.px, minimum=32, help="pixels of a side"),
                "classes": Option(kind="int", default=self.classes, minimum=2, help="classes"),
            }
        )

    def facts(self) -> WorkloadFacts:
        *_, last = self.residual_blocks()
        return WorkloadFacts(
            family="resnet",
            builder="workloads.resnet.model:build_resnet",
            unit="images",
            units_per_sample=1,
            parts=self.parts(),
            heads=(),
            batch_norm=True,
            # BatchNorm needs two values a channel in training: two samples if the last feature map is 1 x 1.
            minimum_batch=2 if last.own[-1].px == 1 else 1,
            memory_formats=("contiguous", "channels_last"),
            datasets=fit_images(shape=(3, self.px, self.px), classes=self.classes),
        )

    @property
    def first(self) -> Convolution:
        """The convolution before the blocks."""
        return Convolution(7, 3, 64, _halved(self.px))

    def residual_blocks(self) -> Iterator[ResidualBlock]:
        """Every block in the order of the forward pass."""
        px, channels = _halved(self.first.px), self.first.outputs
        for stage, count in enumerate(self.blocks):
            width = 64 << stage
            outputs = width * self.expansion
            for block in range(count):
                px_in, px = px, _halved(px) if stage > 0 and block == 0 else px
                own = [Convolution(3, channels, width, px), Convolution(3, width, outputs, px)]
                if self.bottleneck:
                    first, last = Convolution(1, channels, width, px_in), Convolution(1, width, outputs, px)
                    own = [first, Convolution(3, width, width, px), last]
                beside = () if channels == outputs else (Convolution(1, channels, outputs, px),)
                yield ResidualBlock(tuple(own), beside)
                channels = outputs

    def parts(self) -> ModelParts:
        """Each convolution and BatchNorm saves its input, BatchNorm also two statistics a channel, ReLU its
        result.

        The result of ReLU is the input of the next convolution, and is counted there.
        """
        pooled = _halved(self.first.px) ** 2 * self.first.outputs
        blocks, taken = [], pooled
        for block in self.residual_blocks():
            blocks.append(_residual(block, taken))
            taken = block.own[-1].results
        first, image = self.first, 3 * self.px**2
        stem = Part(
            weights=first.weights,
            # The image, the input of BatchNorm, the result of ReLU, and the place of each maximum.
            saved=Saved(whole=VALUE_BYTES * (image + 2 * first.results) + INDEX_BYTES * pooled),
            saved_once=first.statistics,
            input=VALUE_BYTES * image,
            flops=first.flops,
        )
        head = Part(
            weights=(Weight(rows=self.classes, columns=self.features), Weight(rows=self.classes)),
            saved=Saved(whole=VALUE_BYTES * (taken + self.features + self.classes) + INDEX_BYTES),
            saved_once=SCALAR,
            input=VALUE_BYTES * taken,
            flops=2 * self.features * self.classes,
        )
        return ModelParts(
            stem=stem,
            blocks=tuple(blocks),
            head=head,
            logits=VALUE_BYTES * self.classes,
            by_unit=True,
        )


def _halved(px: int) -> int:
    """Return the side after a stride of 2 with padding (kernel - 1) / 2, as all convolutions of a ResNet
    have."""
    return (px + 1) // 2


def _residual(block: ResidualBlock, taken: int) -> Part:
    every: Sequence[Convolution] = block.own + block.beside
    results = sum(convolution.results for convolution in every)
    between = sum(convolution.results for convolution in block.own[:-1])
    return Part(
        weights=tuple(weight for convolution in every for weight in convolution.weights),
        saved=saved(whole=taken + results + between),
        products=saved(whole=results),
        saved_once=sum(convolution.statistics for convolution in every),
        input=VALUE_BYTES * taken,
        flops=sum(convolution.flops for convolution in every),
    )
