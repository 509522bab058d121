"""Products in float8: by hand, against a simulation that shares no code, and what is left in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from harness.worker.proof.float8 import quantise_products
from results.errors import UsageError
from results.layout import LinearSplit, ModelLayout
from strategies import Trainer, TrainSettings
from strategies.devices import Cuda
from strategies.training.float8 import ScaledLinear, scale_products
from workloads.build import build_workload

BLOCK = ModelLayout(blocks=("0",))


def scaled(layer: nn.Linear) -> nn.Module:
    """The layer as the only block of a model."""
    module = nn.Sequential(layer)
    scale_products(module, BLOCK)
    return module


def in_bf16(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result: Tensor = module(x)
    return result


def test_a_product_and_its_gradients_by_hand() -> None:
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, :2] = torch.tensor([1.0, 1.0])
        layer.weight[1, :2] = torch.tensor([3.3125, 48.0])
        layer.bias.fill_(1.0)
    x = torch.zeros(1, 16)
    # The largest of 448 over 3.09375 is 128 as a power of two. 128 x 3.09375 = 396 lies between 384 and 416.
    x[0, :2] = torch.tensor([1.0, 3.09375])
    x.requires_grad_()
    y = in_bf16(scaled(layer), x)
    assert y.dtype == torch.bfloat16
    # The scale of the second output is 8, and 8 x 3.3125 = 26.5 lies between 26 and 28. In bfloat16 the sum
    # 3.25 + 3 x 48 is 147.
    assert y[0, :3].tolist() == [1 + 3 + 1, 147 + 1, 1]
    gradient = torch.zeros_like(y)
    gradient[0, :2] = torch.tensor([1.34375, 0.0])
    y.backward(gradient)
    # e5m2 has 1.25 and 1.5 (e4m3: 1.375). Weights get the product in bfloat16 of what is not rounded: 4.1572.
    assert x.grad[0, :3].tolist() == [1.25, 1.25, 0]
    assert layer.weight.grad[0, :3].tolist() == [1.34375, 4.15625, 0]
    assert layer.bias.grad[:2].tolist() == [1.34375, 0]


@pytest.mark.parametrize("workload", ["gpt-nano:seq=16", "llama-nano:seq=16", "moe-nano:seq=16"])
def test_a_simulation_of_its_own_code_has_the_same_bits(workload) -> None:
    """Sums of products that are exact in single precision, which torch adds up alike on one CPU."""
    built = build_workload(workload)
    ours, theirs = built.module, copy.deepcopy(built.module)
    scale_products(ours, built.layout)
    quantise_products(theirs, built.layout.blocks, built.layout.splits)
    batch = built.synthetic(torch.Generator().manual_seed(0), 2)
    for module in (ours, theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            built.loss_of(module, batch).backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_a_row_is_the_same_whatever_rows_are_beside_it() -> None:
    torch.manual_seed(0)
    layer = scaled(nn.Linear(32, 48))
    x = torch.randn(2, 6, 32) * torch.logspace(-6, 6, 6)[:, None]
    whole = in_bf16(layer, x)
    assert torch.equal(in_bf16(layer, x[:1, 2:3]), whole[:1, 2:3])
    assert torch.isfinite(whole).all()
    assert in_bf16(layer, torch.zeros(1, 32)).isfinite().all()


def test_what_is_no_layer_of_a_block_stays_as_it_is() -> None:
    built = build_workload("llama-nano")
    scale_products(built.module, built.layout)
    named = {name for name, part in built.module.named_modules() if isinstance(part, ScaledLinear)}
    of_block = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    of_block += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert named == {f"{block}.{name}" for block in built.layout.blocks for name in of_block}
    router = ModelLayout(blocks=("0",), splits=(LinearSplit(name="0.1", by="outputs"),))
    mixture = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    scale_products(mixture, router)
    assert [type(part) for part in mixture[0]] == [nn.Linear, ScaledLinear]
    odd = nn.Sequential(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 16)))
    scale_products(odd, BLOCK)
    assert [type(part) for part in odd[0]] == [nn.Linear, nn.Linear, ScaledLinear]
    x = torch.randn(4, 16)
    plain = nn.Linear(16, 16)
    assert torch.equal(scaled(copy.deepcopy(plain))(x), plain(x))


def test_a_model_or_a_device_without_such_products_is_refused(monkeypatch) -> None:
    settings = TrainSettings(precision="float8")
    with pytest.raises(UsageError, match="multiples of 16, which this model lacks; use bf16"):
        Trainer(
            nn.Sequential(nn.Linear(8, 8)), nn.MSELoss(), device=torch.device("cpu"), settings=settings,
            layout=BLOCK,
        )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    for capability, found in (((8, 0), "NVIDIA A100-SXM4-80GB"), ((8, 9), None), ((10, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        assert Cuda(torch.device("cuda")).without_float8() == found
    with pytest.raises(UsageError, match="NVIDIA A100-SXM4-80GB has no products in float8"):
        scale_products(nn.Sequential(nn.Linear(16, 16)), BLOCK, "NVIDIA A100-SXM4-80GB")
