"""The measures and closed forms of fully connected layers with ReLU and dropout between them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from results.parts import VALUE_BYTES, ModelParts, Part, Saved, Weight
from workloads.activations import INDEX_BYTES, SCALAR
from workloads.datasets.facts import fit_images
from workloads.shape import Shape, WorkloadFacts


@dataclass(frozen=True, kw_only=True)
class MLPShape(Shape):
    """A classifier of fully connected layers."""

    widths: tuple[int, ...]
    """Inputs, hidden widths, classes."""
    dropout: float

    def facts(self) -> WorkloadFacts:
        return WorkloadFacts(
            family="mlp",
            builder="workloads.mlp.model:build_mlp",
            unit="images",
            units_per_sample=1,
            parts=self.parts(),
            heads=(),
            batch_norm=False,
            minimum_batch=1,
            memory_formats=("contiguous",),
            datasets=fit_images(shape=self.widths[:1], classes=self.widths[-1]),
        )

    def parts(self) -> ModelParts:
        """The model has no blocks, only a head. A hidden layer saves the result of ReLU, dropout's mask, and
        the input of the next layer."""
        inputs, *hidden, classes = self.widths
        layers = (
            (Weight(rows=outputs, columns=taken), Weight(rows=outputs))
            for taken, outputs in pairwise(self.widths)
        )
        kept = inputs + 3 * sum(hidden) + classes
        head = Part(
            weights=tuple(weight for layer in layers for weight in layer),
            saved=Saved(whole=VALUE_BYTES * kept + INDEX_BYTES),
            saved_once=SCALAR,
            input=VALUE_BYTES * inputs,
            flops=sum(2 * taken * outputs for taken, outputs in pairwise(self.widths)),
        )
        empty = Part(weights=(), saved=Saved())
        return ModelParts(stem=empty, blocks=(), head=head, logits=VALUE_BYTES * classes, by_unit=True)
