"""The models of ResNet and GPT are those of their papers."""

from __future__ import annotations

import math

import pytest
import torch

from workloads.build import build_workload
from workloads.gpt.model import GPT
from workloads.resnet.model import Bottleneck


@pytest.mark.parametrize(
    ("name", "classes", "most"),
    # Kaiming's ResNet starts a good deal above a model that knows nothing.
    [("gpt-nano", 256, 1.05), ("llama-nano", 256, 1.05), ("mlp", 10, 1.05), ("resnet18-32px", 10, 1.6)],
)
def test_the_first_loss_is_that_of_a_model_that_knows_nothing(name: str, classes: int, most: float) -> None:
    torch.manual_seed(0)
    workload = build_workload(name)
    inputs, targets = workload.synthetic(torch.Generator().manual_seed(0), 32)
    loss = workload.loss(workload.module(inputs), targets).item()
    assert 0.95 < loss / math.log(classes) < most


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


@pytest.mark.parametrize("name", ["gpt-nano", "llama-nano"])
def test_a_language_model_does_not_look_ahead(name: str) -> None:
    torch.manual_seed(0)
    module = build_workload(name).module.eval()
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
