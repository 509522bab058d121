"""What there is: workloads and data sets, their options, and the facts that planning needs of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

from results.cell import Cell
from results.errors import SpecError
from results.spec import Catalog, Entry, Option, Spec
from workloads.shapes import GPTShape, LlamaShape, MLPShape, ResNetShape, Shape, TextShape

Unit = Literal["images", "tokens", "samples"]
Family = Literal["resnet", "gpt", "llama", "mlp", "py"]

DIGITS_IMAGES = 1797
DIGITS_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFacts:
    """What is known of a workload without building it; None where only the user's code knows."""

    family: Family
    unit: Unit
    """What throughput counts."""
    units_per_sample: int
    """Of a `py:` workload the built Workload says the unit and this; here they are "samples" and 1."""
    parameters: int | None
    forward_flops_per_sample: int | None
    """Forward pass, 1 multiply-add = 2 FLOP; what is counted stands in `workloads.shapes`."""
    default_batch: int
    """Samples per replica where the user names none."""
    default_optimizer: str
    """Canonical spec text."""
    datasets: tuple[str, ...]
    """Names of the data sets that fit, the default first."""
    cpu_preset: bool
    """Whether it is the one of its family that suits a CPU core."""
    minimum_batch: int = 1
    """Samples that BatchNorm needs in one micro-batch."""
    blocks: int | None = None
    """Repeated blocks, which a pipeline's stages are made of; 0: it cannot be cut."""
    heads: tuple[int, ...] | None = None
    """What tensor parallelism divides: counts of heads; empty: its layers cannot be split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """One model of a family."""

    help: str
    shape: Shape
    batch: int
    optimizer: str
    cpu_preset: bool = False


# He et al.: 0.1 at a batch of 256, here in proportion to the batch.
_SGD_64 = "sgd:lr=0.025:weight_decay=0.0001"
_SGD_32 = "sgd:lr=0.0125:weight_decay=0.0001"
_GPT2 = GPTShape(layers=12, width=768, heads=12, context=1024, vocabulary=50257, seq=1024)

_MEMBERS: Mapping[str, _Member] = MappingProxyType(
    {
        "resnet18": _Member(
            help="ResNet-18, 11.7 M parameters",
            shape=ResNetShape(blocks=(2, 2, 2, 2), bottleneck=False),
            batch=64,
            optimizer=_SGD_64,
        ),
        "resnet50": _Member(
            help="ResNet-50, 25.6 M parameters",
            shape=ResNetShape(blocks=(3, 4, 6, 3), bottleneck=True),
            batch=64,
            optimizer=_SGD_64,
        ),
        "resnet101": _Member(
            help="ResNet-101, 44.5 M parameters",
            shape=ResNetShape(blocks=(3, 4, 23, 3), bottleneck=True),
            batch=32,
            optimizer=_SGD_32,
        ),
        "resnet18-32px": _Member(
            help="ResNet-18 on 32 x 32 pixels and 10 classes: the ResNet for a CPU core",
            shape=ResNetShape(blocks=(2, 2, 2, 2), bottleneck=False, px=32, classes=10),
            batch=8,
            optimizer="sgd:lr=0.002",
            cpu_preset=True,
        ),
        "gpt-nano": _Member(
            help="GPT of 4 layers and width 128 over bytes: the GPT for a CPU core",
            shape=GPTShape(layers=4, width=128, heads=4, context=64, vocabulary=256, seq=64),
            batch=4,
            optimizer="adamw:lr=0.001",
            cpu_preset=True,
        ),
        "gpt2-small": _Member(help="GPT-2, 124 M parameters", shape=_GPT2, batch=8, optimizer="adamw"),
        "gpt2-medium": _Member(
            help="GPT-2 medium, 355 M parameters",
            shape=replace(_GPT2, layers=24, width=1024, heads=16),
            batch=4,
            optimizer="adamw",
        ),
        "gpt2-large": _Member(
            help="GPT-2 large, 774 M parameters",
            shape=replace(_GPT2, layers=36, width=1280, heads=20),
            batch=2,
            optimizer="adamw",
        ),
        "gpt2-xl": _Member(
            help="GPT-2 XL, 1.56 G parameters",
            shape=replace(_GPT2, layers=48, width=1600, heads=25),
            batch=1,
            optimizer="adamw",
        ),
        "llama-nano": _Member(
            help="Llama of 4 layers and width 128 over bytes: the Llama for a CPU core",
            shape=LlamaShape(
                layers=4,
                width=128,
                heads=4,
                kv_heads=2,
                hidden=352,
                context=64,
                vocabulary=256,
                seq=64,
                tied=True,
            ),
            batch=4,
            optimizer="adamw:lr=0.001",
            cpu_preset=True,
        ),
        "llama-125m": _Member(
            help="Llama of MobileLLM-125M's measures, 125 M parameters",
            shape=LlamaShape(
                layers=30,
                width=576,
                heads=9,
                kv_heads=3,
                hidden=1536,
                context=2048,
                vocabulary=32000,
                seq=2048,
                tied=True,
            ),
            batch=4,
            optimizer="adamw",
        ),
        "llama-1b": _Member(
            help="Llama 3.2 1B, 1.24 G parameters",
            shape=LlamaShape(
                layers=16,
                width=2048,
                heads=32,
                kv_heads=8,
                hidden=8192,
                context=131072,
                vocabulary=128256,
                seq=4096,
                tied=True,
                theta=500_000.0,
            ),
            batch=1,
            optimizer="adamw",
        ),
        "llama-7b": _Member(
            help="Llama 2 7B, 6.74 G parameters",
            shape=LlamaShape(
                layers=32,
                width=4096,
                heads=32,
                kv_heads=32,
                hidden=11008,
                context=4096,
                vocabulary=32000,
                seq=4096,
                tied=False,
            ),
            batch=1,
            optimizer="adamw",
        ),
        "mlp": _Member(
            help="classifier 784-512-256-10 with ReLU and dropout 0.1",
            shape=MLPShape(widths=(784, 512, 256, 10), dropout=0.1),
            batch=768,
            optimizer="sgd:lr=0.05",
            cpu_preset=True,
        ),
    }
)

_PY = WorkloadFacts(
    family="py",
    unit="samples",
    units_per_sample=1,
    parameters=None,
    forward_flops_per_sample=None,
    default_batch=8,
    default_optimizer="sgd:lr=0.01",
    datasets=("synthetic", "digits", "text"),
    cpu_preset=False,
)


def _options(member: _Member) -> Mapping[str, Option]:
    shape = member.shape
    if isinstance(shape, ResNetShape) and not member.cpu_preset:
        return {
            "px": Option(kind="int", default=shape.px, minimum=32, help="pixels of a side"),
            "classes": Option(kind="int", default=shape.classes, minimum=2, help="classes"),
        }
    if isinstance(shape, TextShape):
        text = f"tokens of a sample, at most {shape.context}"
        return {"seq": Option(kind="int", default=shape.seq, minimum=1, help=text)}
    return {}


WORKLOADS = Catalog(
    "workload",
    [
        *(
            Entry(name=name, help=member.help, options=MappingProxyType(_options(member)))
            for name, member in _MEMBERS.items()
        ),
        Entry(
            name="py",
            help="your own: MODULE:FUNCTION beside the study file; the function returns a workloads.Workload",
            positional=Option(kind="str", help="MODULE:FUNCTION, such as mypackage.mymodule:build"),
        ),
    ],
)

_WORKERS = MappingProxyType(
    {"workers": Option(kind="int", default=0, minimum=0, help="processes that prepare batches; 0: the rank")}
)

DATASETS = Catalog(
    "dataset",
    [
        Entry(name="synthetic", help="random samples made beforehand on the device: no input pipeline"),
        Entry(
            name="digits",
            help=f"{DIGITS_IMAGES} handwritten digits of scikit-learn, resized to the workload's input",
            options=_WORKERS,
        ),
        Entry(
            name="text",
            help="bytes of a text: Python's own standard library, or text:PATH for a file of yours",
            positional=Option(kind="str", default="stdlib", help="PATH of a text file"),
            options=_WORKERS,
        ),
    ],
)


def default_workloads(device: str) -> tuple[str, ...]:
    """One ResNet and one GPT that suit the device ("cpu" or "cuda")."""
    return ("resnet18-32px", "gpt-nano") if device == "cpu" else ("resnet50", "gpt2-small")


def shape_of(spec: Spec) -> Shape | None:
    """The measures of a parsed workload; None for a `py:` one. Raises SpecError for seq above the context."""
    member = _MEMBERS.get(spec.name)
    if member is None:
        return None
    shape = member.shape
    if isinstance(shape, ResNetShape) and spec.options:
        return replace(shape, px=spec.integer("px"), classes=spec.integer("classes"))
    if isinstance(shape, TextShape):
        seq = spec.integer("seq")
        if seq > shape.context:
            raise SpecError(f"workload {spec.name}: seq is at most its context of {shape.context}, not {seq}")
        return replace(shape, seq=seq)
    return shape


def facts(spec: Spec) -> WorkloadFacts:
    """What planning needs to know of a parsed workload. Raises SpecError for seq above the context."""
    shape = shape_of(spec)
    return _PY if shape is None else _facts(spec.name, shape)


@cache
def _facts(name: str, shape: Shape) -> WorkloadFacts:
    """Counted once a shape: a plan of 10,000 cells asks for each."""
    member = _MEMBERS[name]
    return WorkloadFacts(
        family=_family(shape),
        unit="tokens" if isinstance(shape, TextShape) else "images",
        units_per_sample=shape.seq if isinstance(shape, TextShape) else 1,
        parameters=shape.parameters,
        forward_flops_per_sample=shape.forward_flops,
        default_batch=member.batch,
        default_optimizer=member.optimizer,
        datasets=_fitting(shape),
        cpu_preset=member.cpu_preset,
        minimum_batch=shape.minimum_batch,
        blocks=_blocks(shape),
        heads=_heads(shape),
    )


def _blocks(shape: Shape) -> int:
    if isinstance(shape, ResNetShape):
        return sum(shape.blocks)
    return shape.layers if isinstance(shape, TextShape) else 0


def _heads(shape: Shape) -> tuple[int, ...]:
    if isinstance(shape, LlamaShape):
        return shape.heads, shape.kv_heads
    return (shape.heads,) if isinstance(shape, GPTShape) else ()


def _family(shape: Shape) -> Family:
    if isinstance(shape, ResNetShape):
        return "resnet"
    if isinstance(shape, LlamaShape):
        return "llama"
    return "gpt" if isinstance(shape, GPTShape) else "mlp"


def _fitting(shape: Shape) -> tuple[str, ...]:
    if isinstance(shape, TextShape):
        return ("synthetic", "text")
    few = isinstance(shape, ResNetShape) and shape.classes < DIGITS_CLASSES
    return ("synthetic",) if few else ("synthetic", "digits")


def refusal(cell: Cell) -> str | None:
    """Why a cell's workload, data and batch do not go together, for the report; None if they do."""
    spec, dataset = WORKLOADS.parse(cell.workload), DATASETS.parse(cell.dataset)
    known = facts(spec)
    if dataset.name not in known.datasets:
        return f"{spec.text} does not take {dataset.name}; it takes {', '.join(known.datasets)}"
    if cell.micro_batch < known.minimum_batch:
        return f"BatchNorm of {spec.text} needs at least {known.minimum_batch} samples in a micro-batch"
    if cell.memory_format == "channels_last" and known.family not in ("resnet", "py"):
        return f"channels_last is an order of image channels; {spec.text} has none"
    if dataset.name == "digits" and DIGITS_IMAGES // cell.replicas < cell.micro_batch:
        share = DIGITS_IMAGES // cell.replicas
        return (
            f"digits has {share} images for each of {cell.replicas}, less than a batch of {cell.micro_batch}"
        )
    return None
