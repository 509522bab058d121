"""Selective checkpointing: what is saved, what runs again, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.training.checkpointing import checkpoint_blocks

aten = torch.ops.aten


class Attending(nn.Module):
    """Attention with a residual, a layer norm, and a GELU between two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Convolving(nn.Sequential):
    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Dropout(0.25),
        )


SHAPES = {"attending": (8, 32, 32), "convolving": (8, 32, 8, 8)}
"""Large compared with the state of the random generator, 5 KB that every checkpoint keeps."""
LAYOUT = ModelLayout(blocks=("0", "1"))


@pytest.fixture(params=["attending", "convolving"])
def model(request) -> tuple[nn.Sequential, Tensor]:
    """Two blocks and a batch for them."""
    torch.manual_seed(0)
    kind: Callable[[int], nn.Module] = {"attending": Attending, "convolving": Convolving}[request.param]
    return nn.Sequential(kind(32), kind(32)).train(), torch.randn(*SHAPES[request.param])


def checkpointed(module: nn.Sequential, selective: bool | None) -> nn.Sequential:
    """A copy without checkpointing (None), with all of it, or with the selective one."""
    twin = copy.deepcopy(module)
    if selective is not None:
        checkpoint_blocks(twin, LAYOUT, selective=selective)
    return twin


def loss_of(module: nn.Module, inputs: Tensor) -> Tensor:
    torch.manual_seed(7)
    return module(inputs).square().mean()


class Calls(TorchDispatchMode):
    """Counts what really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[object] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func] += 1
        return func(*args, **(kwargs or {}))


def run(module: nn.Module, inputs: Tensor) -> tuple[Counter[object], Counter[object]]:
    """The operations that run in forward, and in backward."""
    with Calls() as forward:
        loss = loss_of(module, inputs)
    with Calls() as backward:
        loss.backward()
    return forward.counted, backward.counted


def saved_bytes(module: nn.Module, inputs: Tensor) -> int:
    """The bytes that a forward pass allocates and does not free, by the profiler's books of the allocator."""
    # What earlier tests have left in cycles would count as freed, whenever the collector comes to it.
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = loss_of(module, inputs)
    finally:
        gc.enable()
    loss.backward()
    return sum(event.self_cpu_memory_usage for event in profiler.events())


PRODUCTS = {
    # Of each block: query, key and value in one, up (with a bias), down (without), and the attention.
    "attending": {
        aten.addmm.default: 2 * 2,
        aten.mm.default: 2,
        aten._scaled_dot_product_flash_attention_for_cpu.default: 2,
    },
    "convolving": {aten.convolution.default: 2},
}
OTHERS = {"attending": aten.gelu.default, "convolving": aten.relu.default}


def test_products_run_once_and_other_operations_again_in_backward(model, request) -> None:
    module, inputs = model
    kind = request.node.callspec.params["model"]
    plain, backward = run(checkpointed(module, None), inputs)
    assert {name: plain[name] for name in PRODUCTS[kind]} == PRODUCTS[kind]
    for selective, again in ((True, 0), (False, 1)):
        forward, repeated = run(checkpointed(module, selective), inputs)
        assert {name: forward[name] for name in PRODUCTS[kind]} == PRODUCTS[kind]
        # Backward multiplies too: what counts is what it does beyond a backward without checkpointing.
        beyond = {name: repeated[name] - backward[name] for name in PRODUCTS[kind]}
        assert beyond == {name: again * count for name, count in PRODUCTS[kind].items()}
        assert (forward[OTHERS[kind]], repeated[OTHERS[kind]]) == (2, 2)
    assert (plain[OTHERS[kind]], backward[OTHERS[kind]]) == (2, 0)


def test_selective_checkpointing_keeps_more_than_block_inputs_and_less_than_all(model) -> None:
    module, inputs = model
    nothing, some, everything = (
        saved_bytes(checkpointed(module, selective), inputs) for selective in (False, True, None)
    )
    assert 0 < nothing < some < everything


def test_a_block_that_the_model_does_not_have_is_named(model) -> None:
    with pytest.raises(UsageError, match="the layout names '9'"):
        checkpoint_blocks(model[0], ModelLayout(blocks=("9",)))
