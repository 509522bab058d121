"""The facts that a family of models declares without building a model: one class a family, torch-free.

One shape gives the module, and the closed forms against which the module is checked. FLOPs are counted for
one sample's forward pass, 1 multiply-add = 2 FLOP: convolutions, matrix products and the two products of
attention (in full, including the masked causal half). Biases, normalisation, activations, pooling, softmax,
embedding look-ups and the loss are left out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal, Self

from results.cell import MemoryFormat
from results.errors import SpecError
from results.parts import ModelParts, Unknown
from results.spec import Option, Spec, Value
from workloads.datasets.facts import fit_tokens

METRICS = ("val_loss", "val_accuracy", "loss")
"""Metrics of every workload, whose names a workload's own `metrics` must not take."""
WorkUnit = Literal["images", "tokens", "samples"]


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """Facts of a model that are known without building it.

    They have no defaults: a family states all of them, and a fact that it does not know is `Unknown` with the
    reason.
    """

    family: str
    builder: str
    """MODULE:FUNCTION that makes the shape a `workloads.Workload`; imported when a model is built."""
    own_code: bool = False
    """Whether the builder is a user's file in the study's folder, which is called without the shape."""
    hashed_by: str | None = None
    """The place of a function from the positional of a text and the study's folder to a hash over the
    files of the user that ranks run; None: they run none."""
    unit: WorkUnit | Unknown
    """The unit of throughput."""
    units_per_sample: int | Unknown
    parts: ModelParts | Unknown
    """Parameters, activations and FLOPs, part by part."""
    heads: tuple[int, ...] | Unknown
    """The numbers of attention heads, which tensor parallelism divides; empty: no layer can be split."""
    uncut: str | None = None
    """Why a user's own model cannot be cut into a pipeline, if that is known and its parts are not."""
    undivided: str | None = None
    """Why the tokens of a sequence cannot be divided over ranks, as a clause; None: they can."""
    together: str | None = None
    """Why all replicas have to take each step together, as a clause; None: they need not."""
    batch_norm: bool | Unknown
    minimum_batch: int | Unknown
    """The samples of the smallest possible micro-batch: BatchNorm may need more than one."""
    memory_formats: tuple[MemoryFormat, ...] | Unknown
    """The values of `--memory-format`: a model of images (channels, px, px) supports `channels_last` too."""
    datasets: tuple[str, ...] | Unknown
    """The names of the data sets that fit, the default first."""

    @cached_property
    def parameters(self) -> int | Unknown:
        return self.parts if isinstance(self.parts, Unknown) else self.parts.values

    @cached_property
    def forward_flops(self) -> int | Unknown:
        """FLOPs of one sample, as the module's docstring counts them."""
        if not isinstance(self.parts, Unknown) and self.parts.uncounted is not None:
            return Unknown(self.parts.uncounted)
        return self.parts if isinstance(self.parts, Unknown) else self.parts.flops

    def contradicted(self, *, parameters: int | None = None, forward_flops: float | None = None) -> list[str]:
        """Return a sentence for each stated figure that the built model contradicts.

        The figures are the parameters, and, if they differ by more than 1 %, the FLOPs of the forward pass of
        one sample (None: not counted).
        """
        stated = {"parameters": (self.parameters, parameters), "FLOPs": (self.forward_flops, forward_flops)}
        return [
            f"the workload states {said:,} {what}, and its model has {built:,.0f}: predictions are for "
            f"another model; correct the shape of the workload"
            for what, (said, built) in stated.items()
            if not isinstance(said, Unknown) and built is not None
            if abs(said - built) > (0 if what == "parameters" else 0.01 * built)
        ]

    @cached_property
    def by_unit(self) -> bool:
        """Whether the model can be given its initial values unit by unit (`ModelParts.by_unit`)."""
        return not isinstance(self.parts, Unknown) and self.parts.by_unit

    @cached_property
    def blocks(self) -> int | Unknown:
        """The number of repeated blocks, which are divided into pipeline stages; 0: the model cannot be
        cut."""
        return self.parts if isinstance(self.parts, Unknown) else len(self.parts.blocks)


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    """The measures of one model, of which a family is a subclass; options of a workload's text are its
    fields."""

    @abstractmethod
    def facts(self) -> WorkloadFacts:
        """Return all facts of the model that are known without building it."""

    @property
    def options(self) -> Mapping[str, Option]:
        """The fields that a user may set."""
        return MappingProxyType({})

    @property
    def positional(self) -> Option | None:
        """The value that a user writes after the name and a colon, if any."""
        return None

    @property
    def even_options(self) -> Mapping[str, Value]:
        """The options by which the experts of this model get as many rows each; empty: none do."""
        return MappingProxyType({})

    def of(self, spec: Spec) -> Self:
        """Return this shape with the options of a parsed text."""
        return replace(self, **spec.options)


@dataclass(frozen=True, kw_only=True)
class TextShape(Shape):
    """The measures of a transformer over tokens."""

    layers: int
    width: int
    heads: int
    context: int
    """The largest number of tokens of a sample that the model supports."""
    vocabulary: int
    """The number of different tokens."""
    seq: int
    """Tokens of one sample, at most `context`."""
    pad_vocabulary: int = 1

    @property
    def options(self) -> Mapping[str, Option]:
        text = f"tokens of a sample, at most {self.context}"
        padded = (
            f"rows of the embedding and of the head: the vocabulary of {self.vocabulary}, rounded up to a "
            f"multiple of this; 64 suits tensor cores"
        )
        return MappingProxyType(
            {
                "seq": Option(kind="int", default=self.seq, minimum=1, help=text),
                "pad_vocabulary": Option(kind="int", default=1, minimum=1, maximum=65536, help=padded),
            }
        )

    @property
    def rows(self) -> int:
        """The rows of the embedding and of the head, and logits of each token. Padding rows have no token."""
        return math.ceil(self.vocabulary / self.pad_vocabulary) * self.pad_vocabulary

    def of(self, spec: Spec) -> Self:
        """Return the shape with these options.

        Raises SpecError for more tokens than the model supports, and for padding that adds no rows.
        """
        shape = super().of(spec)
        if shape.seq > self.context:
            raise SpecError(
                f"workload {spec.name}: seq is at most its context of {self.context}, not {shape.seq}"
            )
        if shape.pad_vocabulary > 1 and shape.rows == shape.vocabulary:
            raise SpecError(
                f"workload {spec.name}: its vocabulary of {shape.vocabulary} is a multiple of "
                f"{shape.pad_vocabulary} as it is: leave pad_vocabulary out"
            )
        return shape

    def text_facts(
        self, *, family: str, builder: str, parts: ModelParts, heads: tuple[int, ...]
    ) -> WorkloadFacts:
        """Return the facts of a transformer over tokens, with those that its family states."""
        return WorkloadFacts(
            family=family,
            builder=builder,
            unit="tokens",
            units_per_sample=self.seq,
            parts=parts,
            heads=heads,
            batch_norm=False,
            minimum_batch=1,
            memory_formats=("contiguous",),
            datasets=fit_tokens(vocabulary=self.vocabulary),
        )
