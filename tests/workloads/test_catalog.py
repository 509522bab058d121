"""The planner's facts of workloads: options, refusals, unknown facts, and how a workload is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import pytest
import torch
from builders import a_cell

from results.cell import Cell
from results.errors import SpecError
from results.parts import ModelParts, Part, Saved, Weight
from results.spec import Option
from workloads import catalog
from workloads.build import build_workload
from workloads.catalog import (
    MEMBERS,
    WORKLOADS,
    Member,
    default_workloads,
    facts,
    refusal,
    register,
    shape_of,
)
from workloads.shape import Shape, WorkloadFacts
from workloads.workload import ImageInput, Workload


def test_a_padded_vocabulary_adds_rows_and_no_tokens() -> None:
    # 50,257 tokens to 786 x 64 = 50,304 rows of width 768.
    bare, padded = (facts(WORKLOADS.parse(f"gpt2-small{padding}")) for padding in ("", ":pad_vocabulary=64"))
    assert padded.parameters - bare.parameters == 47 * 768
    assert padded.forward_flops - bare.forward_flops == 2 * 1024 * 47 * 768
    workload = build_workload("gpt-nano:pad_vocabulary=96:seq=64")
    inputs, targets = workload.synthetic(torch.Generator().manual_seed(0), 50)
    assert int(torch.cat([inputs, targets]).max()) == 255
    assert workload.module(inputs[:1]).shape == (1, 64, 288)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt-nano:seq=65", "seq is at most its context of 64, not 65"),
        ("gpt-nano:pad_vocabulary=64", "256 is a multiple of 64 as it is: leave pad_vocabulary out"),
        ("py", "MODULE:FUNCTION"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(text, says) -> None:
    with pytest.raises(SpecError, match=says):
        facts(WORKLOADS.parse(text))


def test_options_set_the_measures_of_a_shape() -> None:
    shape = shape_of(WORKLOADS.parse("resnet18:px=96:classes=12"))
    assert shape == replace(MEMBERS["resnet18"].shape, px=96, classes=12)


def test_a_users_model_is_unknown_with_the_reason() -> None:
    spec = WORKLOADS.parse("py:mypackage.mymodule:build")
    assert spec.text == "py:mypackage.mymodule:build"
    known = facts(spec)
    assert (known.family, known.own_code, known.builder) == ("py", True, "mypackage.mymodule:build")
    stated = {"family", "own_code", "hashed_by", "builder", "uncut", "undivided", "together"}
    others = {field.name for field in fields(known)} - stated | {"parameters", "forward_flops", "blocks"}
    said = {str(getattr(known, name)) for name in others}
    assert said == {"unknown, because planning does not run a user's own code"}


def test_each_family_has_one_cpu_preset_and_the_defaults_on_cpu_are_such() -> None:
    presets = [(member.shape.facts().family, name) for name, member in MEMBERS.items() if member.cpu_preset]
    assert sorted(presets) == [
        ("gpt", "gpt-nano"),
        ("llama", "llama-nano"),
        ("mlp", "mlp"),
        ("moe", "moe-nano"),
        ("resnet", "resnet18-32px"),
    ]
    assert all(MEMBERS[name].cpu_preset for name in default_workloads("cpu"))
    assert [MEMBERS[name].shape.facts().family for name in default_workloads("cuda")] == ["resnet", "gpt"]


@dataclass(frozen=True, kw_only=True)
class LineShape(Shape):
    """One linear layer: the smallest family."""

    width: int = 3

    @property
    def options(self) -> Mapping[str, Option]:
        return {"width": Option(kind="int", default=self.width, minimum=1, help="inputs")}

    def facts(self) -> WorkloadFacts:
        empty = Part(weights=(), saved=Saved())
        head = Part(weights=(Weight(rows=2, columns=self.width),), saved=Saved(), flops=4 * self.width)
        return WorkloadFacts(
            family="line",
            builder=f"{__name__}:build_line",
            unit="images",
            units_per_sample=1,
            parts=ModelParts(stem=empty, blocks=(), head=head),
            heads=(),
            batch_norm=False,
            minimum_batch=1,
            memory_formats=("contiguous",),
            datasets=("synthetic",),
        )


def build_line(shape: LineShape) -> Workload:
    from torch import nn

    takes = ImageInput(shape=(shape.width,), classes=2)
    module = nn.Linear(shape.width, 2, bias=False)
    return Workload(module=module, loss=nn.functional.cross_entropy, synthetic=takes.synthetic)


LINE = Member(name="line", help="one layer", shape=LineShape(), batch=4, optimizer="adamw")


@pytest.fixture
def own_catalog(monkeypatch) -> None:
    """Forget what a test registers."""
    monkeypatch.setattr(catalog, "MEMBERS", dict(MEMBERS))
    monkeypatch.setattr(WORKLOADS, "_entries", dict(WORKLOADS.entries))


@pytest.mark.usefixtures("own_catalog")
def test_a_workload_that_is_registered_is_listed_known_and_built() -> None:
    register(LINE)
    assert list(WORKLOADS.entries)[-1] == "line"
    spec = WORKLOADS.parse("line:width=5")
    assert facts(spec).parameters == 10
    workload = build_workload(spec.text)
    assert sum(parameter.numel() for parameter in workload.module.parameters()) == 10
    assert refusal(cell("line", "digits")) == "line does not take digits; it takes synthetic"


@pytest.mark.usefixtures("own_catalog")
def test_a_name_is_registered_once() -> None:
    again = r"workload 'mlp' is declared already \(classifier 784.*\); choose another name"
    with pytest.raises(SpecError, match=again):
        register(replace(LINE, name="mlp"))
    assert MEMBERS["mlp"].help.startswith("classifier 784")


def cell(workload: str, dataset: str = "synthetic", *, micro_batch: int = 8, **changes: object) -> Cell:
    return a_cell(workload=workload, dataset=dataset, micro_batch=micro_batch, **changes)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (cell("gpt-nano", "digits"), "gpt-nano does not take digits; it takes synthetic, text"),
        (cell("mlp", "text"), "mlp does not take text"),
        (cell("resnet18:classes=9", "digits"), "does not take digits"),
        # At 32 px the last stage is 1 x 1: one sample is one value a channel.
        (cell("resnet18-32px", micro_batch=1), "needs at least 2 samples"),
        (
            cell("gpt-nano", memory_format="channels_last"),
            "does not take --memory-format channels_last; it takes contiguous",
        ),
        *(
            (cell(workload, precision="float8"), f"{workload} has no transformer blocks")
            for workload in ("mlp", "resnet18-32px")
        ),
        # 1797 // 2 = 898.
        (
            cell("mlp", "digits", micro_batch=899),
            "digits has 898 images for each of 2 replicas, fewer than a micro-batch of 899",
        ),
    ],
)
def test_unfit_combinations_are_refused_with_the_reason(asked, says) -> None:
    assert says in (refusal(asked) or "")


@pytest.mark.parametrize(
    "asked",
    [
        cell("resnet18-32px", "digits", memory_format="channels_last"),
        cell("resnet18:px=64", micro_batch=1),
        cell("gpt-nano", "text", micro_batch=1),
        cell("mlp", "digits", micro_batch=898),
        cell("py:m:build", "digits"),
    ],
    ids=lambda asked: asked.workload,
)
def test_fit_combinations_are_accepted(asked) -> None:
    assert refusal(asked) is None


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import workloads

    with pytest.raises(AttributeError, match="Workloads"):
        _ = workloads.Workloads
