"""ResNet, GPT and Llama follow their papers; parts of Llama are computed again as plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from workloads.build import build_workload
from workloads.llama import LlamaShape
from workloads.llama.model import GroupedAttention, RMSNorm, rotated, rotations
from workloads.resnet.model import Bottleneck


@pytest.mark.parametrize(
    ("name", "classes", "most"),
    # Kaiming's ResNet starts a good deal above a model that knows nothing.
    [
        ("moe-nano", 256, 1.05),
        ("gpt-nano", 256, 1.05),
        ("llama-nano", 256, 1.05),
        ("mlp", 10, 1.05),
        ("resnet18-32px", 10, 1.6),
    ],
)
def test_the_first_loss_is_that_of_a_model_that_knows_nothing(name, classes, most) -> None:
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


@pytest.mark.parametrize("name", ["gpt-nano", "llama-nano", "moe-nano"])
def test_a_language_model_does_not_look_ahead(name) -> None:
    torch.manual_seed(0)
    module = build_workload(name).module.eval()
    tokens = torch.arange(64)[None]
    changed = tokens.clone()
    changed[0, 40:] = 7
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


SMALL = LlamaShape(
    layers=2, width=16, heads=4, kv_heads=2, hidden=24, context=12, vocabulary=20, seq=6, tied=True
)


def test_rms_norm_by_hand() -> None:
    norm = RMSNorm(2)
    nn.init.constant_(norm.weight, 2.0)
    # Root mean square of (3, 4): sqrt(25 / 2) = 3.5355.
    expected = torch.tensor([6.0, 8.0]) / math.sqrt(12.5)
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), expected)


def test_rms_norm_does_not_overflow_in_half_precision() -> None:
    out = RMSNorm(4).half()(torch.full((4,), 1000.0, dtype=torch.float16))
    torch.testing.assert_close(out, torch.ones(4, dtype=torch.float16))


def test_rotary_positions_turn_pairs_by_the_papers_angles() -> None:
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    out = rotated(x, rotations(x, theta=100.0))
    for place in range(3):
        for pair in range(2):
            # Speeds 100 ** 0 and 100 ** -0.5; a pair is one number of the complex plane.
            angle = place * (1.0, 0.1)[pair]
            before = complex(x[0, 0, place, pair], x[0, 0, place, pair + 2])
            after = before * complex(math.cos(angle), math.sin(angle))
            assert complex(out[0, 0, place, pair], out[0, 0, place, pair + 2]) == pytest.approx(
                after, rel=1e-6
            )


def _naive(attention: GroupedAttention, x: Tensor) -> Tensor:
    """Head by head and position by position, over (tokens, width) in float64."""
    tokens, width = x.shape
    size = width // attention.heads
    weights = [getattr(attention, f"{name}_proj").weight.double() for name in ("q", "k", "v")]
    query, key, value = (x @ weight.T for weight in weights)
    out = torch.zeros(tokens, width, dtype=torch.float64)
    for head in range(attention.heads):
        shared = head // (attention.heads // attention.kv_heads)
        q = query[None, None, :, head * size : (head + 1) * size]
        k = key[None, None, :, shared * size : (shared + 1) * size]
        turns = rotations(q, attention.theta)
        q, k = rotated(q, turns)[0, 0], rotated(k, turns)[0, 0]
        v = value[:, shared * size : (shared + 1) * size]
        for place in range(tokens):
            weight = torch.softmax(k[: place + 1] @ q[place] / math.sqrt(size), dim=0)
            out[place, head * size : (head + 1) * size] = weight @ v[: place + 1]
    return out @ attention.o_proj.weight.double().T


def test_attention_is_that_of_the_naive_loop() -> None:
    torch.manual_seed(0)
    attention = GroupedAttention(SMALL)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 6, 16)
    torch.testing.assert_close(
        attention(x)[0].double(), _naive(attention, x[0].double()), rtol=1e-4, atol=1e-5
    )
