"""The table of workloads, and the facts of them that planning needs; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Self

from results.cell import Cell
from results.extensions import Extension
from results.parts import ModelParts, Unknown
from results.spec import Catalog, Entry, Option, Spec, require_options
from workloads.datasets.facts import DATASETS
from workloads.gpt import GPTShape
from workloads.llama import LlamaShape
from workloads.mlp import MLPShape
from workloads.moe import MoEShape
from workloads.resnet import ResNetShape
from workloads.shape import Shape, WorkloadFacts


@dataclass(frozen=True, slots=True)
class Member:
    """One model of a family: an entry of the catalog."""

    name: str
    help: str
    shape: Shape
    batch: int
    """The default batch per replica."""
    optimizer: str
    """The default optimizer, as a canonical spec text."""
    cpu_preset: bool = False
    """Whether it is the member of its family for a CPU core."""
    fixed: bool = False
    """Whether its name contains its measures, so that it has no options."""


@dataclass(frozen=True, kw_only=True)
class UserShape(Shape):
    """A user's own model, `py:MODULE:FUNCTION`, of which planning knows only the place of its code."""

    function: str = ""
    """MODULE:FUNCTION."""

    @property
    def positional(self) -> Option:
        return Option(kind="str", help="MODULE:FUNCTION", example="mypackage.mymodule:build")

    def of(self, spec: Spec) -> Self:
        return type(self)(function=str(spec.positional))

    def facts(self) -> WorkloadFacts:
        unknown = Unknown("planning does not run a user's own code")
        return WorkloadFacts(
            family="py",
            builder=self.function,
            own_code=True,
            hashed_by="workloads.source:source_hash",
            unit=unknown,
            units_per_sample=unknown,
            parts=unknown,
            heads=unknown,
            batch_norm=unknown,
            minimum_batch=unknown,
            memory_formats=unknown,
            datasets=unknown,
        )


# He et al.: 0.1 at a batch of 256, here in proportion to the batch.
_SGD_64 = "sgd:lr=0.025:weight_decay=0.0001"
_SGD_32 = "sgd:lr=0.0125:weight_decay=0.0001"
_RESNET18 = ResNetShape(blocks=(2, 2, 2, 2), bottleneck=False)
_RESNET50 = ResNetShape(blocks=(3, 4, 6, 3), bottleneck=True)
_RESNET101 = replace(_RESNET50, blocks=(3, 4, 23, 3))
_GPT2 = GPTShape(layers=12, width=768, heads=12, context=1024, vocabulary=50257, seq=1024)
_GPT2_MEDIUM = replace(_GPT2, layers=24, width=1024, heads=16)
_GPT2_LARGE = replace(_GPT2, layers=36, width=1280, heads=20)
_GPT2_XL = replace(_GPT2, layers=48, width=1600, heads=25)
# Rotary positions have no parameters: 32,768 tokens as after position interpolation (arXiv:2306.15595).
_LLAMA2 = LlamaShape(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=32,
    hidden=11008,
    context=32768,
    vocabulary=32000,
    seq=4096,
    tied=False,
)
_LLAMA3 = replace(_LLAMA2, context=131072, vocabulary=128256, theta=5e5)
_LLAMA3_1B = replace(_LLAMA3, layers=16, width=2048, kv_heads=8, hidden=8192, tied=True)
_MOBILE_LLM = replace(
    _LLAMA2, layers=30, width=576, heads=9, kv_heads=3, hidden=1536, context=2048, seq=2048, tied=True
)
_GPT_NANO = GPTShape(layers=4, width=128, heads=4, context=64, vocabulary=256, seq=64)
_LLAMA_NANO = LlamaShape(**vars(_GPT_NANO), kv_heads=2, hidden=352, tied=True)
_MOE_NANO = MoEShape(**vars(_LLAMA_NANO) | {"hidden": 128}, experts=8, chosen=2)
_MIXTRAL = MoEShape(
    **vars(_LLAMA2) | {"kv_heads": 8, "hidden": 14336, "context": 32768, "theta": 1e6}, experts=8, chosen=2
)
_MIXTRAL_22B = replace(_MIXTRAL, layers=56, width=6144, heads=48, hidden=16384, context=65536)
_GRANITE = MoEShape(
    **vars(_LLAMA2)
    | {"width": 1536, "heads": 24, "kv_heads": 8, "hidden": 512, "vocabulary": 49155, "tied": True},
    experts=40,
    chosen=8,
)
_SMALL = replace(_RESNET18, px=32, classes=10)
_MLP = MLPShape(widths=(784, 512, 256, 10), dropout=0.1)
_OWN = "your own: MODULE:FUNCTION next to the study file; the function returns a workloads.Workload"

_MEMBERS = (
    Member("resnet18", "ResNet-18, 11.7 M parameters", _RESNET18, 64, _SGD_64),
    Member("resnet50", "ResNet-50, 25.6 M parameters", _RESNET50, 64, _SGD_64),
    Member("resnet101", "ResNet-101, 44.5 M parameters", _RESNET101, 32, _SGD_32),
    Member(
        "resnet18-32px",
        "ResNet-18 on 32 x 32 pixels and 10 classes: the ResNet for a CPU core",
        _SMALL,
        8,
        "sgd:lr=0.002",
        cpu_preset=True,
        fixed=True,
    ),
    Member(
        "gpt-nano",
        "GPT of 4 layers and width 128 over bytes: the GPT for a CPU core",
        _GPT_NANO,
        4,
        "adamw:lr=0.001",
        cpu_preset=True,
    ),
    Member("gpt2-small", "GPT-2, 124 M parameters", _GPT2, 8, "adamw"),
    Member("gpt2-medium", "GPT-2 medium, 355 M parameters", _GPT2_MEDIUM, 4, "adamw"),
    Member("gpt2-large", "GPT-2 large, 774 M parameters", _GPT2_LARGE, 2, "adamw"),
    Member("gpt2-xl", "GPT-2 XL, 1.56 G parameters", _GPT2_XL, 1, "adamw"),
    Member(
        "llama-nano",
        "Llama of 4 layers and width 128 over bytes: the Llama for a CPU core",
        _LLAMA_NANO,
        4,
        "adamw:lr=0.001",
        cpu_preset=True,
    ),
    Member("llama-125m", "Llama of MobileLLM-125M's measures, 125 M parameters", _MOBILE_LLM, 4, "adamw"),
    Member("llama-1b", "Llama 3.2 1B, 1.24 G parameters", _LLAMA3_1B, 1, "adamw"),
    Member("llama-7b", "Llama 2 7B, 6.74 G parameters", _LLAMA2, 1, "adamw"),
    Member(
        "moe-nano",
        "mixture of 8 experts, 2 a token, of 4 layers and width 128 over bytes: the mixture for a CPU core",
        _MOE_NANO,
        4,
        "adamw:lr=0.001",
        cpu_preset=True,
    ),
    Member(
        "granite-3b",
        "Granite 3.0 3B A800M's measures, 3.30 G parameters, 0.88 G active",
        _GRANITE,
        1,
        "adamw",
    ),
    Member("mixtral-8x7b", "Mixtral 8x7B, 46.7 G parameters, 12.9 G active", _MIXTRAL, 1, "adamw"),
    Member("mixtral-8x22b", "Mixtral 8x22B, 141 G parameters, 39.2 G active", _MIXTRAL_22B, 1, "adamw"),
    Member(
        "mlp",
        "classifier 784-512-256-10 with ReLU and dropout 0.1",
        _MLP,
        768,
        "sgd:lr=0.05",
        cpu_preset=True,
    ),
    Member("py", _OWN, UserShape(), 8, "sgd:lr=0.01"),
)


class Workloads(Catalog):
    """The catalog of workloads, to which packages add members."""

    def admit(self, extension: Extension) -> None:
        member = extension.load()
        if not isinstance(member, Member) or member.name != extension.name:
            needed = f"a workloads.catalog.Member whose name is {extension.name!r}"
            raise extension.wrong(member, needed)
        with extension.told("has facts that fail"):
            entry = _entry(member)
            require_options(entry)
            extension.require_place("builder", member.shape.facts().builder)
        register(member)

    def _unknown(self, name: str) -> str:
        if name.endswith(".py"):
            module = name.removesuffix(".py").lstrip("./").replace("/", ".")
            return f"there is no workload {name!r} (did you mean 'py:{module}:FUNCTION'?)"
        return super()._unknown(name)


WORKLOADS = Workloads("workload", [])
MEMBERS: dict[str, Member] = {}
"""Members by name; filled by `register`."""


def register(member: Member) -> None:
    """Add a workload. Raises SpecError if its name is taken."""
    WORKLOADS.add(_entry(member))
    MEMBERS[member.name] = member


def _entry(member: Member) -> Entry:
    shape = member.shape
    options = MappingProxyType({}) if member.fixed else shape.options
    return Entry(name=member.name, help=member.help, positional=shape.positional, options=options)


for _member in _MEMBERS:
    register(_member)


def default_workloads(device: str) -> tuple[str, ...]:
    """Return one ResNet and one GPT that suit the device ("cpu" or "cuda")."""
    return ("resnet18-32px", "gpt-nano") if device == "cpu" else ("resnet50", "gpt2-small")


def shape_of(spec: Spec) -> Shape:
    """Return the measures of a parsed workload. Raises SpecError for options that do not fit the model."""
    return MEMBERS[spec.name].shape.of(spec)


def even_workload(spec: Spec) -> str | None:
    """Return the text of the workload that differs from `spec` only in that its experts get as many rows
    each (its own text, if they do); None where the family has no such options."""
    even = MEMBERS[spec.name].shape.even_options
    if not even:
        return None
    given = {name: value for name, value in spec.options.items() if value is not None}
    return WORKLOADS.parse(":".join([spec.name, *(f"{k}={v}" for k, v in {**given, **even}.items())])).text


def facts(spec: Spec) -> WorkloadFacts:
    """Return the facts of a parsed workload without building it. Raises SpecError as `shape_of` does."""
    return _facts(spec.text)


@cache
def _facts(text: str) -> WorkloadFacts:
    """Compute the facts of each text once: a plan of 10,000 cells needs them for each cell."""
    known = shape_of(WORKLOADS.parse(text)).facts()
    if text not in _COUNTED:
        return known
    parts, splits, uncut = _COUNTED[text]
    return replace(known, parts=parts, heads=() if splits is False else known.heads, uncut=uncut)


_COUNTED: dict[str, tuple[ModelParts | Unknown, bool | None, str | None]] = {}
"""The facts of users' own models that were built to count them, by text: parts, whether layers can be split
(None: unknown), and why they cannot be cut into a pipeline."""


def learn(text: str, parts: ModelParts | Unknown, *, splits: bool | None, uncut: str | None = None) -> None:
    """Keep for this process the counted parts of a user's own model, or why they could not be counted."""
    _COUNTED[text] = parts, splits, uncut
    _facts.cache_clear()


def refusal(cell: Cell, *, trains: bool = False) -> str | None:
    """Return why a cell's workload, data and batch do not fit together, for the report; None if they do.

    With `trains` the cell is trained, without the samples that are held out.

    Facts that the plan does not know (of a user's own model) refuse nothing: the worker checks them.
    """
    spec, dataset = WORKLOADS.parse(cell.workload), DATASETS.facts(cell.dataset)
    known = facts(spec)
    if not isinstance(known.datasets, Unknown) and dataset.name not in known.datasets:
        return f"{spec.text} does not take {dataset.name}; it takes {', '.join(known.datasets)}"
    if isinstance(known.minimum_batch, int) and cell.micro_batch < known.minimum_batch:
        return f"BatchNorm of {spec.text} needs at least {known.minimum_batch} samples in a micro-batch"
    if reason := _unsuited(cell, known):
        return f"{spec.text} {reason}"
    held_out, use = (dataset.held_out, " to train on") if trains else (0, "")
    share = None if dataset.samples is None else (dataset.samples - held_out) // cell.replicas
    if share is not None and share < cell.micro_batch:
        return (
            f"{dataset.name} has {share} {dataset.takes}{use} for each of {cell.replicas} replicas, fewer "
            f"than a micro-batch of {cell.micro_batch}"
        )
    return None


def _unsuited(cell: Cell, known: WorkloadFacts) -> str | None:
    """Return why a model does not take a memory format or a precision; None if it does."""
    if not isinstance(known.memory_formats, Unknown) and cell.memory_format not in known.memory_formats:
        takes = ", ".join(known.memory_formats)
        return f"does not take --memory-format {cell.memory_format}; it takes {takes}"
    if cell.precision == "float8" and known.heads == ():
        return "has no transformer blocks, whose linear layers --precision float8 is for; use bf16"
    return None
