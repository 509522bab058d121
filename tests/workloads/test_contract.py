"""Every workload keeps its contract: facts that it states unbuilt equal the facts of the built model.

A line in `SHAPES` checks all of it for a new family; a new member of the catalog is checked by itself.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from data_requests import a_request
from torch import Tensor, nn

from harness.worker.cell.model_parts import flops_of
from results.errors import UsageError
from results.parts import ModelParts, Unknown
from strategies.catalog import OPTIMIZERS
from workloads.build import build
from workloads.catalog import MEMBERS
from workloads.data import open_batches
from workloads.datasets.facts import DATASETS
from workloads.gpt import GPTShape
from workloads.llama import LlamaShape
from workloads.mlp import MLPShape
from workloads.moe import MoEShape
from workloads.resnet import ResNetShape
from workloads.shape import Shape, WorkloadFacts
from workloads.workload import Batch, Workload

sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))
from vit import VIT, ViTShape


class ContiguousViT(ViTShape):
    """A model of images of another package that takes no other layout."""

    def facts(self) -> WorkloadFacts:
        return replace(super().facts(), memory_formats=("contiguous",))


OURS = {name: member for name, member in MEMBERS.items() if not member.shape.facts().own_code}
GPT = GPTShape(layers=3, width=24, heads=4, context=20, vocabulary=37, seq=11)
LLAMA = LlamaShape(
    layers=2, width=32, heads=4, kv_heads=2, hidden=44, context=64, vocabulary=29, seq=13, tied=True
)
MOE = MoEShape(**vars(LLAMA) | {"hidden": 12}, experts=6, chosen=2)
RESNET = ResNetShape(blocks=(2, 1, 1, 2), bottleneck=False, px=48, classes=7)
SHAPES: dict[str, Shape] = {
    "gpt": GPT,
    "gpt-odd": replace(GPT, layers=1, width=10, heads=1, seq=3),
    "gpt-long": replace(GPT, context=96, seq=96),
    "gpt-padded": replace(GPT, pad_vocabulary=16),
    "llama": LLAMA,
    "llama-untied": replace(LLAMA, tied=False, kv_heads=4),
    "llama-one-key": replace(LLAMA, kv_heads=1, hidden=8, seq=40),
    "llama-padded": replace(LLAMA, pad_vocabulary=8, tied=False),
    "moe": MOE,
    "moe-not-renormalised": replace(MOE, renormalised=False, chosen=3, kv_heads=4),
    "moe-auxiliary": replace(MOE, aux=0.01),
    "moe-bias": replace(MOE, bias=0.001),
    "moe-capacity": replace(MOE, capacity=3.0),
    "moe-balanced": replace(MOE, routing="balanced", tied=False),
    "moe-skewed": replace(MOE, routing="skewed", skew=3),
    "resnet": RESNET,
    "resnet-odd": replace(RESNET, px=75),
    "resnet-bottleneck": replace(RESNET, bottleneck=True, blocks=(1, 2, 1, 1)),
    "resnet-ten-classes": replace(RESNET, blocks=(1, 1, 1, 1), classes=10),
    "mlp": MLPShape(widths=(30, 20, 12, 5), dropout=0.1),
    "mlp-flat": MLPShape(widths=(30, 12), dropout=0.1),
    "mlp-nine-classes": MLPShape(widths=(36, 9), dropout=0.1),
    **{name: member.shape for name, member in OURS.items() if member.cpu_preset},
    "vit": VIT.shape,
    "vit-contiguous": ContiguousViT(**vars(VIT.shape)),
}

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_member = pytest.mark.parametrize("member", OURS.values(), ids=OURS)


def parts_of(shape: Shape) -> ModelParts:
    parts = shape.facts().parts
    assert isinstance(parts, ModelParts)
    return parts


def on_meta(shape: Shape) -> Workload:
    with torch.device("meta"):
        return build(shape)


def is_ours(shape: Shape) -> bool:
    return shape.facts().builder.startswith("workloads.")


def drawn(workload: Workload, samples: int) -> Batch:
    return workload.synthetic(torch.Generator().manual_seed(0), samples)


def parameters(module: nn.Module) -> list[tuple[int, int]]:
    """Rows and values of each, in the order of registration."""
    return [(parameter.shape[0], parameter.numel()) for parameter in module.parameters()]


@every_member
def test_a_members_facts_are_those_of_what_it_builds(member) -> None:
    known, workload = member.shape.facts(), on_meta(member.shape)
    assert sum(values for _, values in parameters(workload.module)) == known.parameters
    assert (workload.unit, workload.units_per_sample) == (known.unit, known.units_per_sample)
    assert len(workload.layout.blocks) == known.blocks
    assert all(part.saved.over(1) > 0 for part in parts_of(member.shape).blocks)


@every_member
def test_a_members_defaults_are_canonical_texts_and_fit(member) -> None:
    known = member.shape.facts()
    assert OPTIMIZERS.parse(member.optimizer).text == member.optimizer
    assert not isinstance(known.datasets, Unknown)
    assert known.datasets[0] == "synthetic"
    assert all(DATASETS.parse(dataset).text == dataset for dataset in known.datasets)
    assert not isinstance(known.minimum_batch, Unknown)
    assert member.batch >= known.minimum_batch


@every_member
def test_a_members_options_are_measures_of_its_shape_at_their_default(member) -> None:
    measures = {field.name for field in fields(member.shape)}
    for name, option in member.shape.options.items():
        assert name in measures
        assert option.default == getattr(member.shape, name)


@every_shape
def test_the_parameters_are_the_modules_own(shape) -> None:
    """One by one, whatever the order; a tied head adds nothing."""
    counted_ones = parameters(on_meta(shape).module)
    weights = [(w.rows, w.values) for part in parts_of(shape).parts for w in part.weights]
    assert sorted(weights) == sorted(counted_ones)
    assert shape.facts().parameters == sum(values for _, values in counted_ones)


@every_shape
def test_the_counted_flops_are_the_closed_form(shape) -> None:
    assert flops_of(on_meta(shape), 3).forward == 3 * parts_of(shape).flops


@pytest.mark.parametrize("samples", [2, 5])
@every_shape
def test_the_bytes_that_autograd_keeps_are_the_closed_form(shape, samples) -> None:
    parts = parts_of(shape)
    closed = sum(samples * part.saved.over(1) + part.saved_once for part in parts.parts)
    assert closed == saved_bytes(build(shape), samples)


def saved_bytes(workload: Workload, samples: int) -> int:
    """All that autograd keeps of one forward pass with its loss: storages, each once, without the model's."""
    module = workload.module
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    inputs, targets = drawn(workload, samples)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        workload.loss(module.train()(inputs), targets)
    return sum(kept.values())


@every_shape
def test_the_layout_names_the_blocks_in_forward_order(shape) -> None:
    """Each has the parameters of its closed form one by one, and takes the bytes that it says."""
    workload, parts = build(shape), parts_of(shape)
    seen: list[tuple[str, Tensor]] = []
    for name in workload.layout.blocks:
        workload.module.get_submodule(name).register_forward_pre_hook(
            lambda _, arguments, name=name: seen.append((name, arguments[0]))
        )
    workload.module.train()(drawn(workload, 3)[0])
    assert tuple(name for name, _ in seen) == workload.layout.blocks
    assert len(seen) == len(parts.blocks)
    for (name, taken), part in zip(seen, parts.blocks, strict=True):
        module = workload.module.get_submodule(name)
        assert [(w.rows, w.values) for w in part.weights] == parameters(module)
        assert 3 * part.input == taken.nbytes


@every_shape
def test_a_model_that_can_be_cut_is_head_of_blocks_of_stem(shape) -> None:
    workload = build(shape)
    layout, module = workload.layout, workload.module.eval()
    inputs, _ = drawn(workload, 2)
    assert layout.can_be_cut == bool(shape.facts().blocks)
    for name in (*layout.stem, *layout.head):
        module.get_submodule(name)
    if not layout.can_be_cut:
        return
    assert (*inputs.shape[1:], str(inputs.dtype)) == (*layout.sample, f"torch.{layout.sample_type}")
    with torch.no_grad():
        x = module.stem(inputs)
        for name in layout.blocks:
            x = module.get_submodule(name)(x)
        torch.testing.assert_close(module.head(x), module(inputs))


@every_shape
def test_tensor_parallelism_splits_the_layers_that_the_layout_names(shape) -> None:
    """Matrices by rows or columns, and biases of layers that give a part; and heads are counted by name."""
    workload = on_meta(shape)
    layout, heads = workload.layout, shape.facts().heads
    by = {split.name: split.by for split in layout.splits}
    dealt = {("outputs", "weight"): "rows", ("outputs", "bias"): "rows", ("inputs", "weight"): "columns"}
    for block, part in zip(layout.blocks, parts_of(shape).blocks, strict=True):
        named = [name.rpartition(".") for name, _ in workload.module.get_submodule(block).named_parameters()]
        splits = [dealt.get((by.get(f"{block}.{layer}", ""), kind)) for layer, _, kind in named]
        assert [weight.split for weight in part.weights] == splits
    assert not isinstance(heads, Unknown)
    assert bool(heads) == bool(layout.splits)
    places = (name.rpartition(".") for name in layout.heads)
    counts = tuple(getattr(workload.module.get_submodule(module), name) for module, _, name in places)
    assert counts == heads * len(layout.blocks)


@every_shape
def test_unit_and_samples_are_as_stated(shape) -> None:
    known, workload = shape.facts(), on_meta(shape)
    assert (workload.unit, workload.units_per_sample) == (known.unit, known.units_per_sample)
    inputs, targets = drawn(workload, 3)
    assert len(inputs) == len(targets) == 3
    if known.unit == "tokens":
        assert inputs[0].numel() == known.units_per_sample


@every_shape
def test_a_step_from_a_seed_is_finite_and_reaches_every_parameter(shape) -> None:
    torch.manual_seed(0)
    workload = build(shape)
    inputs, targets = drawn(workload, 2)
    loss = workload.loss(workload.module(inputs), targets)
    assert loss.isfinite()
    torch.autograd.backward(loss)
    without = [
        name
        for name, parameter in workload.module.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all()
    ]
    assert without == []


@every_shape
def test_initial_parameters_follow_from_the_seed(shape) -> None:
    def built(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build(shape).module.parameters())

    first = built(1)
    assert torch.equal(first, built(1))
    assert not torch.equal(first, built(2))


@every_shape
def test_a_model_that_is_built_by_unit_has_the_same_values(shape) -> None:
    """Bit for bit, though the last is filled first, and so has the generator. All of ours are."""
    torch.manual_seed(3)
    whole, after = build(shape).module, torch.get_rng_state()
    torch.manual_seed(3)
    workload = build(shape, by_unit=True)
    module, initial = workload.module, workload.initial
    assert (initial is not None) == parts_of(shape).by_unit
    assert parts_of(shape).by_unit or not is_ours(shape)
    tensors = [*module.parameters(), *module.buffers()]
    if initial is not None:
        assert all(tensor.is_meta for tensor in tensors)
        for tensor in reversed(tensors):
            initial(tensor, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), after)
    expected, found = whole.state_dict(keep_vars=True), module.state_dict(keep_vars=True)
    assert list(found) == list(expected)
    assert all(_is_same(found[name], value) for name, value in expected.items())
    # What is shared stays shared.
    assert len(list(module.parameters())) == len(list(whole.parameters()))


def _is_same(found: Tensor, expected: Tensor) -> bool:
    kinds = {(type(each), each.dtype, each.requires_grad) for each in (found, expected)}
    return len(kinds) == 1 and torch.equal(found, expected)


@every_shape
def test_the_smallest_micro_batch_trains_and_less_does_not(shape) -> None:
    known, workload = shape.facts(), build(shape)
    least = known.minimum_batch
    assert not isinstance(least, Unknown)
    assert any(isinstance(m, nn.BatchNorm2d) for m in workload.module.modules()) is known.batch_norm
    inputs, targets = drawn(workload, least)
    assert workload.loss(workload.module.train()(inputs), targets).isfinite()
    if least > 1:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            workload.module(inputs[: least - 1])


@every_shape
def test_channels_last_is_for_models_of_images_in_channels(shape) -> None:
    """A family of another package need not take it."""
    formats = shape.facts().memory_formats
    assert not isinstance(formats, Unknown)
    images = drawn(on_meta(shape), 2)[0].dim() == 4
    assert ("channels_last" in formats) == images or (images and not is_ours(shape))


@every_shape
def test_data_sets_that_fit_train_and_others_are_refused(shape) -> None:
    workload, known = build(shape), shape.facts().datasets
    assert not isinstance(known, Unknown)
    for dataset in (each.name for each in DATASETS):
        request = a_request(workload, dataset, replicas=1)
        if dataset in known:
            inputs, targets = next(open_batches(request))
            assert workload.loss(workload.module(inputs), targets).isfinite()
        else:
            with pytest.raises(UsageError, match=f"dataset {dataset} "):
                open_batches(request)
