"""The models that are built are the ones the catalog describes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from workloads.build import build_workload
from workloads.catalog import WORKLOADS, facts
from workloads.gpt import GPT, build_gpt
from workloads.mlp import build_mlp
from workloads.resnet import Bottleneck, build_resnet
from workloads.shapes import GPTShape, MLPShape, ResNetShape
from workloads.workload import Workload

NAMES = [entry.name for entry in WORKLOADS if entry.name != "py"]


def parameters(workload: Workload) -> int:
    return sum(parameter.numel() for parameter in workload.module.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_built_module_has_the_parameters_of_the_closed_form(name: str) -> None:
    with torch.device("meta"):
        workload = build_workload(name)
    known = facts(WORKLOADS.parse(name))
    assert parameters(workload) == known.parameters
    assert (workload.unit, workload.units_per_sample) == (known.unit, known.units_per_sample)


@pytest.mark.parametrize(
    ("name", "blocks"), [("resnet18", 8), ("resnet50", 16), ("gpt-nano", 4), ("llama-nano", 4), ("mlp", 0)]
)
def test_the_layout_names_the_blocks_in_forward_order(name: str, blocks: int) -> None:
    with torch.device("meta"):
        workload = build_workload(name)
        seen: list[str] = []
        for block in workload.layout.blocks:
            workload.module.get_submodule(block).register_forward_hook(
                lambda *_, block=block: seen.append(block)
            )
    inputs, _ = workload.synthetic(torch.Generator(), 2)
    workload.module(inputs.to("meta"))
    assert len(seen) == blocks
    assert tuple(seen) == workload.layout.blocks


@settings(max_examples=10, deadline=None)
@given(
    blocks=st.tuples(*[st.integers(1, 3)] * 4),
    bottleneck=st.booleans(),
    px=st.integers(32, 80),
    classes=st.integers(2, 12),
)
def test_any_resnet_has_the_parameters_of_its_shape(
    blocks: tuple[int, int, int, int], bottleneck: bool, px: int, classes: int
) -> None:
    shape = ResNetShape(blocks=blocks, bottleneck=bottleneck, px=px, classes=classes)
    with torch.device("meta"):
        assert parameters(build_resnet(shape)) == shape.parameters


@settings(max_examples=10, deadline=None)
@given(
    layers=st.integers(1, 3), heads=st.integers(1, 4), seq=st.integers(1, 9), vocabulary=st.integers(2, 40)
)
def test_any_gpt_has_the_parameters_of_its_shape(layers: int, heads: int, seq: int, vocabulary: int) -> None:
    shape = GPTShape(layers=layers, width=8 * heads, heads=heads, context=12, vocabulary=vocabulary, seq=seq)
    with torch.device("meta"):
        assert parameters(build_gpt(shape)) == shape.parameters


@settings(max_examples=10, deadline=None)
@given(widths=st.lists(st.integers(1, 20), min_size=2, max_size=5))
def test_any_mlp_has_the_parameters_of_its_shape(widths: list[int]) -> None:
    shape = MLPShape(widths=tuple(widths), dropout=0.1)
    with torch.device("meta"):
        assert parameters(build_mlp(shape)) == shape.parameters


@pytest.mark.parametrize("name", ["gpt-nano", "mlp", "resnet18-32px"])
def test_initial_parameters_follow_from_the_seed(name: str) -> None:
    def built(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build_workload(name).module.parameters())

    assert torch.equal(built(1), built(1))
    assert not torch.equal(built(1), built(2))


@pytest.mark.parametrize("name", ["gpt-nano", "mlp", "resnet18-32px"])
def test_the_first_loss_is_that_of_a_model_that_knows_nothing(name: str) -> None:
    torch.manual_seed(0)
    workload = build_workload(name)
    inputs, targets = workload.synthetic(torch.Generator().manual_seed(0), 32)
    loss = workload.loss(workload.module(inputs), targets).item()
    # ln(classes): 5.55 for bytes, 2.30 for ten classes. Kaiming's ResNet starts a good deal above it.
    expected = math.log(256 if name == "gpt-nano" else 10)
    assert expected * 0.95 < loss < expected * (1.6 if name == "resnet18-32px" else 1.05)


@pytest.mark.parametrize("name", ["gpt-nano", "mlp", "resnet18-32px"])
def test_every_parameter_gets_a_gradient(name: str) -> None:
    workload = build_workload(name)
    inputs, targets = workload.synthetic(torch.Generator().manual_seed(0), 2)
    torch.autograd.backward(workload.loss(workload.module(inputs), targets))
    without = [name for name, parameter in workload.module.named_parameters() if parameter.grad is None]
    assert without == []


def test_a_resnet_has_the_modules_of_torchvisions() -> None:
    with torch.device("meta"):
        state = build_workload("resnet50").module.state_dict()
    # 53 convolutions, as many norms of five tensors, and the classifier's two.
    assert len(state) == 53 + 5 * 53 + 2
    assert tuple(state["layer4.2.conv3.weight"].shape) == (2048, 512, 1, 1)
    assert tuple(state["layer2.0.downsample.0.weight"].shape) == (512, 256, 1, 1)
    assert next(iter(state)) == "conv1.weight"


def test_a_bottleneck_strides_in_its_3x3_convolution() -> None:
    block = Bottleneck(256, 128, stride=2)
    assert (block.conv1.stride, block.conv2.stride, block.conv3.stride) == ((1, 1), (2, 2), (1, 1))


def test_convolutions_start_as_kaiming_says() -> None:
    torch.manual_seed(0)
    module = build_workload("resnet18-32px").module
    weight = module.get_parameter("layer4.1.conv2.weight")
    # Standard deviation sqrt(2 / fan_out), fan_out = 512 * 3 * 3.
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 4608), rel=0.01)


def test_a_gpt_starts_as_gpt2_says() -> None:
    torch.manual_seed(0)
    module = build_workload("gpt-nano").module
    assert module.get_parameter("wte.weight").std().item() == pytest.approx(0.02, rel=0.03)
    assert module.get_parameter("h.0.mlp.c_fc.weight").std().item() == pytest.approx(0.02, rel=0.03)
    # 0.02 / sqrt(2 * 4 layers).
    assert module.get_parameter("h.3.mlp.c_proj.weight").std().item() == pytest.approx(0.00707, rel=0.03)
    assert not module.get_parameter("h.3.mlp.c_proj.bias").any()


def test_a_gpt_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    module = build_workload("gpt-nano").module.eval()
    tokens = torch.arange(64)[None]
    changed = tokens.clone()
    changed[0, 40:] = 7
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_the_head_of_a_gpt_is_its_embedding() -> None:
    torch.manual_seed(0)
    module = build_workload("gpt-nano:seq=3").module
    assert isinstance(module, GPT)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = module(tokens)[0, :, 200].clone()
        module.wte.weight[200] *= 2  # a token that is not among the inputs
        after = module(tokens)[0, :, 200]
    torch.testing.assert_close(after, 2 * before)
    torch.autograd.backward(module(tokens).sum())
    gradient = module.wte.weight.grad
    assert gradient is not None
    assert gradient[200].abs().sum() > 0
