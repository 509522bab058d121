"""The closed forms of a model's parts against the modules themselves and against autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from results.parts import ModelParts
from workloads.activations import model_parts, parts_of
from workloads.build import build_workload
from workloads.catalog import WORKLOADS
from workloads.gpt import build_gpt
from workloads.llama import build_llama
from workloads.mlp import build_mlp
from workloads.resnet import build_resnet
from workloads.shapes import GPTShape, LlamaShape, MLPShape, ResNetShape, Shape
from workloads.workload import Workload

GPT = GPTShape(layers=3, width=24, heads=4, context=20, vocabulary=37, seq=11)
LLAMA = LlamaShape(
    layers=2, width=32, heads=4, kv_heads=2, hidden=44, context=64, vocabulary=29, seq=13, tied=True
)
RESNET = ResNetShape(blocks=(2, 1, 1, 2), bottleneck=False, px=48, classes=7)
SHAPES: dict[str, Shape] = {
    "gpt": GPT,
    "gpt-odd": replace(GPT, layers=1, width=10, heads=1, seq=3),
    "gpt-long": replace(GPT, context=96, seq=96),
    "llama": LLAMA,
    "llama-untied": replace(LLAMA, tied=False, kv_heads=4),
    "llama-one-key": replace(LLAMA, kv_heads=1, hidden=8, seq=40),
    "resnet": RESNET,
    "resnet-odd": replace(RESNET, px=75),
    "resnet-bottleneck": replace(RESNET, bottleneck=True, blocks=(1, 2, 1, 1)),
    "mlp": MLPShape(widths=(30, 20, 12, 5), dropout=0.1),
    "mlp-flat": MLPShape(widths=(30, 5), dropout=0.1),
}
BATCHES = (2, 5)


def built(shape: Shape) -> Workload:
    if isinstance(shape, GPTShape):
        return build_gpt(shape)
    if isinstance(shape, LlamaShape):
        return build_llama(shape)
    return build_resnet(shape) if isinstance(shape, ResNetShape) else build_mlp(shape)


def saved_bytes(workload: Workload, samples: int) -> int:
    """All that autograd keeps of one forward pass with its loss: storages, each once, without the model's."""
    own = {
        t.untyped_storage().data_ptr() for t in (*workload.module.parameters(), *workload.module.buffers())
    }
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    inputs, targets = workload.synthetic(torch.Generator().manual_seed(0), samples)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        workload.loss(workload.module.train()(inputs), targets)
    return sum(kept.values())


def predicted(parts: ModelParts, samples: int) -> int:
    return sum(samples * part.saved.over(1) + part.saved_once for part in parts.parts)


@pytest.mark.parametrize("samples", BATCHES)
@pytest.mark.parametrize("name", SHAPES)
def test_what_autograd_keeps_is_counted_to_the_byte(name: str, samples: int) -> None:
    shape = SHAPES[name]
    assert predicted(parts_of(shape), samples) == saved_bytes(built(shape), samples)


@pytest.mark.parametrize("name", SHAPES)
def test_the_parameters_are_the_modules_own(name: str) -> None:
    """In the order of registration, rows first; a tied head adds nothing."""
    shape = SHAPES[name]
    module, parts = built(shape).module, parts_of(shape)
    theirs = sorted((p.shape[0], p.numel()) for p in module.parameters())
    assert sorted((w.rows, w.values) for part in parts.parts for w in part.weights) == theirs
    assert parts.values == shape.parameters


@pytest.mark.parametrize("name", [name for name in SHAPES if not name.startswith("mlp")])
def test_each_block_is_the_modules_own(name: str) -> None:
    """Its parameters one by one, and what it takes."""
    shape = SHAPES[name]
    workload, parts = built(shape), parts_of(shape)
    assert len(parts.blocks) == len(workload.layout.blocks)
    inputs, _ = workload.synthetic(torch.Generator().manual_seed(0), 3)
    taken: list[Tensor] = []
    for block in workload.layout.blocks:
        hook = workload.module.get_submodule(block)
        hook.register_forward_pre_hook(lambda module, arguments: taken.append(arguments[0]))
    workload.module.train()(inputs)
    for block, part, x in zip(workload.layout.blocks, parts.blocks, taken, strict=True):
        module = workload.module.get_submodule(block)
        assert [(w.rows, w.values) for w in part.weights] == [
            (p.shape[0], p.numel()) for p in module.parameters()
        ]
        assert 3 * part.input == x.nbytes


def test_the_splits_are_those_of_the_layout() -> None:
    """What tensor parallelism splits: matrices by rows or columns, and biases of layers that give a part."""
    for name in ("gpt", "llama"):
        workload, parts = built(SHAPES[name]), parts_of(SHAPES[name])
        first = workload.layout.blocks[0]
        by = {split.name: split.by for split in workload.layout.splits}
        dealt = {
            ("outputs", "weight"): "rows",
            ("outputs", "bias"): "rows",
            ("inputs", "weight"): "columns",
        }
        named = [
            dealt.get((by.get(f"{first}.{layer}", ""), kind))
            for layer, _, kind in (
                parameter.rpartition(".")
                for parameter, _ in workload.module.get_submodule(first).named_parameters()
            )
        ]
        assert [weight.split for weight in parts.blocks[0].weights] == named


def test_gpt_nano_by_hand() -> None:
    """T = 64, d = 128, h = 4: 16 T d + T (h + 4) = 131,584 values of a block, 4 of which are split by 2.

    At two ranks 12 T d + T h = 98,560 are halved: 131,584 - 49,280 = 82,304.
    """
    parts = model_parts(WORKLOADS.parse("gpt-nano"))
    assert parts is not None
    assert parts.blocks[0].saved.over(1) == 4 * 131_584
    assert parts.blocks[0].saved.over(2) == 4 * 82_304
    # 12 d^2 + 13 d, of which 12 d^2 + 7 d are split: biases of query, key, value and of 4 d.
    assert parts.blocks[0].values == 12 * 128**2 + 13 * 128
    assert parts.blocks[0].values_over(2) == 6 * 128**2 + 7 * 64 + 6 * 128


def test_padding_fills_every_first_dimension() -> None:
    """d = 10 over 4 shards: a norm of 10 becomes 12, and 30 x 10 becomes 32 x 10."""
    block = parts_of(SHAPES["gpt-odd"]).blocks[0]
    norms, qkv, projection = 4 * 12, 32 * 10 + 32, 12 * 10 + 12
    assert block.padded_values(4) == norms + qkv + projection + (40 * 10 + 40) + (12 * 40 + 12)
    assert block.padded_values(1) == block.values


def test_no_parts_are_known_of_a_users_own_model() -> None:
    assert model_parts(WORKLOADS.parse("py:mine:build")) is None


@pytest.mark.parametrize("name", [name for name in WORKLOADS.entries if name != "py"])
def test_every_workload_of_the_catalog_has_parts(name: str) -> None:
    parts = model_parts(WORKLOADS.parse(name))
    assert parts is not None
    assert parts.values > 0
    assert all(part.saved.over(1) > 0 for part in parts.blocks)


def test_the_cpu_presets_are_counted_to_the_byte() -> None:
    for name in ("gpt-nano", "llama-nano", "resnet18-32px", "mlp"):
        parts = model_parts(WORKLOADS.parse(name))
        assert parts is not None
        assert predicted(parts, 2) == saved_bytes(build_workload(name), 2)
