"""The cut of a model into stages: against brute force, FLOPs by hand, and what is left of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import combinations, pairwise
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.pipeline.facts import balanced_cut
from strategies.pipeline.stages import Cut, StageModule, Twin, cut_model, prune, require_cuttable
from strategies.training.checkpointing import checkpoint_blocks


@st.composite
def costs_and_stages(draw: st.DrawFn) -> tuple[list[int], int]:
    costs = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


def all_cuts(blocks: int, stages: int) -> list[list[range]]:
    cuts = []
    for inner in combinations(range(1, blocks), stages - 1):
        bounds = [0, *inner, blocks]
        cuts.append([range(begin, end) for begin, end in pairwise(bounds)])
    return cuts


def dearest(costs: Sequence[int], runs: list[range]) -> int:
    return max(sum(costs[block] for block in run) for run in runs)


@given(costs_and_stages())
def test_no_cut_has_a_cheaper_dearest_stage_and_of_the_best_it_is_the_latest(given_) -> None:
    costs, stages = given_
    cuts = all_cuts(len(costs), stages)
    least = min(dearest(costs, cut) for cut in cuts)
    best = [cut for cut in cuts if dearest(costs, cut) == least]
    # The last stage is as long as it may be, then the one before it, and so on.
    latest = max(best, key=lambda cut: [len(run) for run in reversed(cut)])
    assert balanced_cut(costs, stages) == latest


def test_a_thousand_blocks_are_cut_at_once() -> None:
    runs = balanced_cut([10**15] * 1000, 256)
    # 1000 = 256 * 3 + 232: no stage has more than 4.
    assert (runs[0].start, runs[-1].stop, max(map(len, runs)), min(map(len, runs))) == (0, 1000, 4, 1)


class Tied(nn.Module):
    """An embedding of 7 x 4 that is the head as well, four blocks of 4 x 4, a buffer in each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.inner = nn.ModuleDict({"h": nn.ModuleList(Block() for _ in range(4))})
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(tokens)
        for block in self.inner["h"]:
            x = block(x)
        return self.head(x)

    def stem(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.table.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x)


LAYOUT = ModelLayout(
    blocks=tuple(f"inner.h.{block}" for block in range(4)),
    stem=("table",),
    head=("norm", "table"),
    sample=(5,),
    sample_type="int64",
)


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def cut_of(module: nn.Module, layout: ModelLayout = LAYOUT, *, ranks: int, stages: int) -> Cut:
    require_cuttable(module, layout)
    return cut_model(module, Twin(module), layout, ranks=ranks, stages=stages)


def test_flops_are_those_of_one_sample_and_counting_leaves_no_trace() -> None:
    module, random = tied(), torch.get_rng_state()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    # 5 tokens: 2 * 5 * 4 * 4 FLOP a block, and 2 * 5 * 4 * 7 in the head; an embedding is looked up.
    assert Twin(module).costs(LAYOUT) == [0, 160, 160, 160, 160, 280]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(type(value) in (nn.Parameter, Tensor) for value in module.state_dict(keep_vars=True).values())


def test_the_stem_is_paid_by_the_first_stage_and_the_head_by_the_last() -> None:
    # 160, 160, 160, 160 + 280: the last block alone is 440, with one more 600 > 480.
    assert cut_of(tied(), ranks=2, stages=2).runs == (range(3), range(3, 4))
    layout = ModelLayout(blocks=("1", "2", "3"), stem=("0",), head=("4",), sample=(2,))
    sizes = (2, 100, 1, 1, 100, 1)
    module = Chain(*(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)))
    # 400 + 200, 2, 200 + 200: with the stem 600 and 402; without it 202 and 400 would have been cheapest.
    assert cut_of(module, layout, ranks=2, stages=2).runs == (range(1), range(1, 3))


class Chain(nn.Sequential):
    def stem(self, x: Tensor) -> Tensor:
        return self[0](x)

    def head(self, x: Tensor) -> Tensor:
        return self[-1](x)


@pytest.mark.parametrize(
    ("autocasting", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_tensors_between_stages_are_known_before_they_arrive(
    autocasting, dtype, frozen, checkpointing
) -> None:
    module = tied()
    module.table.requires_grad_(not frozen)
    if frozen:
        module.get_submodule("inner.h.0").requires_grad_(False)
    if checkpointing:
        checkpoint_blocks(module, LAYOUT)
    twin = Twin(module)
    cut = Cut(layout=LAYOUT, runs=(range(1), range(1, 3), range(3, 4)), ranks=3)

    def context() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if autocasting else nullcontext()

    edges = twin.edges(cut, twin.tensor((2, 5), torch.int64), context)
    x = torch.zeros(2, 5, dtype=torch.int64)
    real = [x]
    for stage in range(3):
        real.append(StageModule(cut.pieces(module, stage), context)(real[-1]))
    assert [edge.shape for edge in edges] == [(2, 5), (2, 5, 4), (2, 5, 4), (2, 5, 7)]
    assert [edge.dtype for edge in edges] == [torch.int64, dtype, dtype, dtype]
    assert [edge.requires_grad for edge in edges] == [False, not frozen, True, True]
    for expected, found in zip(real, edges, strict=True):
        assert (expected.shape, expected.stride()) == (found.shape, found.stride())
        assert (expected.dtype, expected.requires_grad) == (found.dtype, found.requires_grad)
    assert torch.equal(real[-1], context_call(module, x, context))


def context_call(module: nn.Module, x: Tensor, context: Callable[[], Any]) -> Tensor:
    with context():
        y: Tensor = module(x)
    return y


def test_the_output_of_a_stage_is_contiguous() -> None:
    turned = StageModule([lambda x: x.t()], nullcontext)(torch.zeros(2, 3))
    assert (turned.shape, turned.is_contiguous()) == ((3, 2), True)


def test_stages_go_around_the_ranks_and_know_their_modules() -> None:
    cut = cut_of(tied(), ranks=2, stages=4)
    assert [cut.stages_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [cut.modules(stage) for stage in range(4)] == [
        ["table", "inner.h.0"],
        ["inner.h.1"],
        ["inner.h.2"],
        ["inner.h.3", "norm", "table"],
    ]
    module = tied()
    owners = cut.ranks_of(module)
    assert owners[module.table.weight] == {0, 1}
    assert owners[module.get_parameter("inner.h.2.linear.bias")] == {0}
    assert owners[module.get_buffer("inner.h.1.count")] == {1}


def test_a_pruned_model_has_its_own_parts_alone_under_their_old_names() -> None:
    cut = Cut(layout=LAYOUT, runs=(range(1), range(1, 3), range(3, 4)), ranks=3)
    names = []
    for rank in range(3):
        module = tied()
        kept = module.get_submodule(LAYOUT.blocks[cut.runs[rank].start])
        prune(module, cut.modules(rank))
        assert module.get_submodule(LAYOUT.blocks[cut.runs[rank].start]) is kept
        names.append([name for name, _ in (*module.named_parameters(), *module.named_buffers())])
    block = ("linear.weight", "linear.bias", "count")
    assert sorted(names[0]) == sorted(["table.weight", *(f"inner.h.0.{name}" for name in block)])
    assert sorted(names[1]) == sorted(f"inner.h.{at}.{name}" for at in (1, 2) for name in block)
    last = ["table.weight", "norm.weight", "norm.bias", *(f"inner.h.3.{name}" for name in block)]
    assert sorted(names[2]) == sorted(last)


def test_a_name_that_begins_like_another_is_another() -> None:
    module = nn.ModuleDict({"h": nn.Linear(1, 1), "h1": nn.Linear(1, 1)})
    prune(module, {"h1"})
    assert list(module) == ["h1"]


def dropping() -> nn.Module:
    module = tied()
    module.get_submodule("inner.h.1").add_module("late", nn.Dropout(0.1))
    return module


def sparse() -> nn.Module:
    module = tied()
    module.table = nn.Embedding(7, 4, sparse=True)
    return module


def stray() -> nn.Module:
    module = tied()
    module.scale = nn.Parameter(torch.ones(4))
    return module


def stray_buffer() -> nn.Module:
    module = tied()
    module.register_buffer("seen", torch.zeros(()))
    return module


def sharing(one: str, other: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = tied()
        module.get_submodule(one).weight = module.get_submodule(other).weight
        return module

    return build


class Idle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


UNFIT: list[tuple[Callable[[], nn.Module], ModelLayout, str]] = [
    (tied, ModelLayout(blocks=LAYOUT.blocks), "give it a layout and the methods stem and head, or use fsdp"),
    (
        lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))),
        ModelLayout(blocks=("1", "2"), stem=("0",), head=("3",), sample=(1,)),
        "give it a layout and the methods stem and head",
    ),
    (dropping, LAYOUT, r"does not support dropout \(inner.h.1.late has p=0.1\): each stage draws its own"),
    (sparse, LAYOUT, "not support sparse gradients, which table has: use ddp or scratch-ddp"),
    (stray, LAYOUT, "no stage for scale"),
    (stray_buffer, LAYOUT, "no stage for seen"),
    (
        stray,
        msgspec.structs.replace(LAYOUT, stem=("scale",)),
        "the layout names 'scale', which is a parameter: put it into its own module, and name that",
    ),
    (
        tied,
        msgspec.structs.replace(LAYOUT, head=("tabel",)),
        r"the layout names 'tabel', .*\(did you mean 'table'\?\)",
    ),
    (
        sharing("inner.h.1.linear", "inner.h.2.linear"),
        LAYOUT,
        "and inner.h.1.linear.weight is also in another: use fsdp",
    ),
    (
        lambda: Chain(nn.Linear(2, 2), Idle(), Idle(), nn.Linear(2, 2), nn.Linear(2, 2), Idle()),
        ModelLayout(blocks=("1", "2", "3", "4"), stem=("0",), head=("5",), sample=(2,)),
        "would have no parameters: use fewer ranks or chunks",
    ),
]


@pytest.mark.parametrize(("build", "layout", "told"), UNFIT)
def test_a_model_that_cannot_be_cut_is_refused_with_the_way_out(build, layout, told) -> None:
    with pytest.raises(UsageError, match=told):
        cut_of(build(), layout, ranks=4, stages=4)


class Reader(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum().item() > 0 else x


def test_a_model_that_reads_its_values_is_refused() -> None:
    module = tied()
    module.inner["h"] = nn.ModuleList(Reader() for _ in range(4))
    with pytest.raises(UsageError, match="cannot be counted on the meta device"):
        cut_of(module, ranks=2, stages=2)


def test_tensors_that_are_no_parameters_or_buffers_do_no_harm() -> None:
    module = tied()
    mask = torch.ones(4)
    module.stem = lambda tokens: module.table(tokens) * mask
    assert cut_of(module, ranks=2, stages=2).runs == (range(3), range(3, 4))


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(UsageError, match="4 blocks are too few for 6 stages: use fewer ranks or chunks"):
        cut_of(tied(), ranks=3, stages=6)


def test_dropout_of_zero_and_parameters_that_one_rank_shares_with_itself_are_fine() -> None:
    module = tied()
    module.get_submodule("inner.h.0").add_module("late", nn.Dropout(0.0))
    # Blocks 0 and 2 are on rank 0 of two, in stages 0 and 2.
    first, third = module.get_submodule("inner.h.0.linear"), module.get_submodule("inner.h.2.linear")
    third.weight = first.weight
    cut = cut_of(module, ranks=2, stages=4)
    assert cut.ranks_of(module)[first.weight] == {0}
