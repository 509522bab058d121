"""What the planner knows of workloads: published sizes, defaults, refusals, all without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from results.cell import Cell
from results.errors import SpecError
from strategies.catalog import OPTIMIZERS
from workloads.catalog import DATASETS, WORKLOADS, default_workloads, facts, refusal


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        # torchvision's documentation of its weights, num_params.
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        # The classifier shrinks from 1000 to 10 classes: 11,689,512 - 990 * (512 + 1).
        ("resnet18-32px", 11_181_642),
        # Hugging Face's gpt2, gpt2-medium, gpt2-large and gpt2-xl, num_parameters().
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        # 256*128 + 64*128 + 4 * (12*128^2 + 13*128) + 2*128.
        ("gpt-nano", 834_304),
        # 785*512 + 513*256 + 257*10.
        ("mlp", 535_818),
    ],
)
def test_parameters_are_the_published_ones(text: str, parameters: int) -> None:
    assert facts(WORKLOADS.parse(text)).parameters == parameters


@pytest.mark.parametrize(
    ("text", "macs"),
    [
        # The usual "1.81, 4.09 and 7.80 GMAC at 224 px", to the last one.
        ("resnet18", 1_814_073_344),
        ("resnet50", 4_089_184_256),
        ("resnet101", 7_801_405_440),
        # 12 blocks of 1024 * 12*768^2 + 2 * 1024^2 * 768, and the head 1024 * 768 * 50257.
        ("gpt2-small", 12 * (7_247_757_312 + 1_610_612_736) + 39_523_713_024),
        # 784*512 + 512*256 + 256*10.
        ("mlp", 535_040),
    ],
)
def test_forward_flops_are_twice_the_published_multiply_adds(text: str, macs: int) -> None:
    assert facts(WORKLOADS.parse(text)).forward_flops_per_sample == 2 * macs


def test_the_stem_of_a_resnet_is_counted_as_by_hand() -> None:
    small, large = (facts(WORKLOADS.parse(f"resnet18:px={px}:classes=10")) for px in (32, 64))
    assert small.parameters == large.parameters
    # Twice the side is four times the positions of every convolution; the classifier stays.
    classifier = 2 * 512 * 10
    assert small.forward_flops_per_sample is not None
    assert large.forward_flops_per_sample == 4 * (small.forward_flops_per_sample - classifier) + classifier


def test_a_gpt_counts_its_tokens() -> None:
    whole, part = (facts(WORKLOADS.parse(text)) for text in ("gpt2-small", "gpt2-small:seq=128"))
    assert (whole.unit, whole.units_per_sample, part.units_per_sample) == ("tokens", 1024, 128)
    assert whole.parameters == part.parameters


def test_seq_above_the_context_is_refused() -> None:
    with pytest.raises(SpecError, match="seq is at most its context of 64, not 65"):
        facts(WORKLOADS.parse("gpt-nano:seq=65"))


def test_a_users_model_is_opaque() -> None:
    spec = WORKLOADS.parse("py:mypackage.mymodule:build")
    assert spec.text == "py:mypackage.mymodule:build"
    known = facts(spec)
    assert (known.family, known.parameters, known.forward_flops_per_sample) == ("py", None, None)


def test_py_alone_says_what_it_needs() -> None:
    with pytest.raises(SpecError, match="MODULE:FUNCTION"):
        WORKLOADS.parse("py")


@pytest.mark.parametrize("name", list(WORKLOADS.entries))
def test_default_optimizers_and_data_sets_are_canonical_texts(name: str) -> None:
    known = facts(WORKLOADS.parse("py:m:build" if name == "py" else name))
    assert OPTIMIZERS.parse(known.default_optimizer).text == known.default_optimizer
    assert known.datasets[0] == "synthetic"
    assert all(DATASETS.parse(dataset).text == dataset for dataset in known.datasets)


def test_each_family_has_one_cpu_preset_and_the_defaults_on_cpu_are_such() -> None:
    known = {entry.name: facts(WORKLOADS.parse(entry.name)) for entry in WORKLOADS if entry.name != "py"}
    presets = {fact.family: name for name, fact in known.items() if fact.cpu_preset}
    assert presets == {"resnet": "resnet18-32px", "gpt": "gpt-nano", "llama": "llama-nano", "mlp": "mlp"}
    assert sum(fact.cpu_preset for fact in known.values()) == 4
    assert all(known[name].cpu_preset for name in default_workloads("cpu"))
    assert [known[name].family for name in default_workloads("cuda")] == ["resnet", "gpt"]


def cell(workload: str, dataset: str = "synthetic", *, micro_batch: int = 8, **changes: object) -> Cell:
    fixed = {"strategy": "ddp", "gpus": 2, "device": "cpu", "backend": "gloo", "optimizer": "sgd"}
    return Cell(workload=workload, dataset=dataset, micro_batch=micro_batch, **(fixed | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (cell("gpt-nano", "digits"), "gpt-nano does not take digits; it takes synthetic, text"),
        (cell("mlp", "text"), "mlp does not take text"),
        (cell("resnet18:classes=9", "digits"), "does not take digits"),
        # At 32 px the last stage is 1 x 1: one sample is one value a channel.
        (cell("resnet18-32px", micro_batch=1), "needs at least 2 samples"),
        (cell("gpt-nano", memory_format="channels_last"), "channels_last is an order of image channels"),
        # 1797 // 2 = 898.
        (cell("mlp", "digits", micro_batch=899), "digits has 898 images for each of 2"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(asked: Cell, says: str) -> None:
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
def test_what_goes_together_is_not_refused(asked: Cell) -> None:
    assert refusal(asked) is None


def test_planning_modules_leave_torch_alone_and_the_users_names_load_it() -> None:
    code = (
        "import sys, workloads, workloads.catalog, workloads.shapes, workloads.source\n"
        "assert 'torch' not in sys.modules\n"
        "from workloads import Batch, ImageInput, TokenInput, Workload\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import workloads

    with pytest.raises(AttributeError, match="Workloads"):
        _ = workloads.Workloads
