"""How gradients get into buckets, and buckets over the ranks: order, overlap, waiting, and memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.worker.exchange.group import ExchangeGroup
from results.errors import UsageError
from strategies.collectives.link import Link
from strategies.gradient_exchange import ExchangeSettings, GradientExchange
from strategies.scratch_ddp import reducer as reducer_module
from strategies.scratch_ddp.reducer import Bucketing, GradientReducer, fill_buckets

CPU = torch.device("cpu")


def bucketing(first: int = 1, later: int = 1, *, find_unused: bool = False) -> Bucketing:
    """One bucket a parameter, unless more bytes are asked for."""
    return Bucketing(first_bytes=first, bytes=later, find_unused=find_unused, as_parameters=True)


def reducer_of(module: nn.Module, group: Any, chosen: Bucketing, *, audited: bool = False) -> GradientReducer:
    exchange = GradientExchange(ExchangeSettings(group=group), device=CPU)
    exchange.audited = audited
    return GradientReducer(dict(module.named_parameters()), exchange, Link(group), chosen)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([torch.float32, torch.float64])), max_size=12),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_every_parameter_is_in_one_bucket_with_its_like_and_only_the_last_of_a_kind_is_not_full(
    drawn, first, later
) -> None:
    parameters = [torch.zeros(count, dtype=kind) for count, kind in drawn]
    runs = fill_buckets(parameters, bucketing(first, later))
    assert sorted(position for run in runs for position in run) == list(range(len(parameters)))
    assert [run[-1] for run in runs] == sorted(run[-1] for run in runs)
    for kind in (torch.float32, torch.float64):
        own = [run for run in runs if parameters[run[0]].dtype == kind]
        assert all(parameters[position].dtype == kind for run in own for position in run)
        for number, run in enumerate(own):
            limit = later if number else first
            sizes = [parameters[position].nbytes for position in run]
            assert sum(sizes[:-1]) < limit
            assert sum(sizes) >= limit or number == len(own) - 1


class Chain(nn.Module):
    """w_k multiplies in the order of `path`: gradients come in the reverse of it."""

    def __init__(self, path: Sequence[int]) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.tensor([k + 2.0])) for k in range(len(path)))
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        for k in self.path:
            x = x * self.w[k]
        return x


def run(module: nn.Module, reducer: GradientReducer, x: float = 1.0) -> list[float | None]:
    """One exchanged backward pass; the gradients."""
    with torch.enable_grad(), reducer.exchanging():
        module(torch.tensor([x])).sum().backward()
    return [p.grad if p.grad is None else p.grad.item() for p in module.parameters()]


class Recorder:
    """A group that notes what is summed, and when."""

    def __init__(self, group: ExchangeGroup, events: list[Any]) -> None:
        self._group, self.events = group, events
        self.rank, self.size = group.rank, group.size

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        self.events.append(("sum", tensors[0].numel()))
        return self._group.allreduce(tensors, options)


def ordered(group: ExchangeGroup, paths: list[list[int]]) -> Any:
    """Names in the buckets before and after the first step, and the gradients of three steps."""
    module = Chain(paths[group.rank()])
    reducer = reducer_of(module, group, bucketing())
    found, gradients = [], []
    for _ in range(3):
        gradients.append(run(module, reducer))
        found.append([bucket.pieces[0].name for bucket in reducer._buckets])
        module.zero_grad()
    return found, gradients


def read_by_host(group: ExchangeGroup, path: list[int]) -> tuple[list[float | None], int]:
    """The gradients of a second step, and how often the host reads what lies on the device, or fills it."""
    module = Chain([0, 1])
    module.path = path
    reducer = reducer_of(module, group, bucketing(find_unused=True))
    run(module, reducer)
    module.zero_grad()
    read, original = [], Tensor.tolist

    def tolist(values: Tensor) -> Any:
        read.append(values.shape)
        return original(values)

    with (
        patch.object(Tensor, "tolist", tolist),
        patch.object(reducer_module.torch, "tensor", wraps=torch.tensor) as filled,
        torch.enable_grad(),
        reducer.exchanging(),
    ):
        module(torch.ones(1)).sum().backward()
    gradients = [p.grad if p.grad is None else p.grad.item() for p in module.parameters()]
    return gradients, len(read) + filled.call_count


def test_a_host_waits_for_who_used_what_only_if_its_own_rank_left_a_parameter_out(threads) -> None:
    assert threads(1, read_by_host, [0, 1]) == [([3.0, 2.0], 0)]
    assert threads(1, read_by_host, [0]) == [([1.0, None], 2)]


def test_from_the_second_step_on_buckets_follow_the_order_that_rank_0_saw(threads) -> None:
    # Registered w.0, w.1, w.2; used 1, 2, 0 on rank 0 (ready: 0, 2, 1), and otherwise on the other ranks.
    paths = [[1, 2, 0], [0, 1, 2], [2, 0, 1]]
    product = 2.0 * 3.0 * 4.0
    for names, gradients in threads(3, ordered, paths):
        assert names == [["w.2", "w.1", "w.0"]] + [["w.0", "w.2", "w.1"]] * 2
        # The same on each rank, k = 3 k * fl(1/3): product / w_k.
        assert gradients == [[product / 2, product / 3, product / 4]] * 3


def reached_late(group: ExchangeGroup, paths: list[list[int]]) -> list[list[str]]:
    """The same, but that the group moves nothing in the first two steps."""
    module = Chain(paths[group.rank()])
    reducer = reducer_of(module, group, bucketing())
    found = []
    for step in range(4):
        group.traffic.enabled = step >= 2
        run(module, reducer)
        found.append([bucket.pieces[0].name for bucket in reducer._buckets])
        module.zero_grad()
    return found


def test_no_order_is_taken_that_did_not_reach_all_ranks(threads) -> None:
    expected = [["w.2", "w.1", "w.0"]] * 3 + [["w.0", "w.2", "w.1"]]
    assert threads(2, reached_late, [[1, 2, 0], [0, 1, 2]]) == [expected] * 2


def launches(group: ExchangeGroup) -> list[Any]:
    """The events of the second step, in which the order is known: gradients, and sums of their buckets."""
    module, events = Chain([0, 1, 2]), []
    reducer = reducer_of(module, Recorder(group, events), bucketing())
    for k, parameter in enumerate(module.w):
        # Registered after the reducer's hook, and so called after it.
        parameter.register_post_accumulate_grad_hook(lambda _, k=k: events.append(f"ready {k}"))
    run(module, reducer)
    module.zero_grad()
    events.clear()
    run(module, reducer)
    return events


def test_a_bucket_is_under_way_before_the_next_gradient_is_ready(threads) -> None:
    expected = [("sum", 1), "ready 2", ("sum", 1), "ready 1", ("sum", 1), "ready 0"]
    assert threads(2, launches) == [expected] * 2


def late_bucket(group: ExchangeGroup) -> list[Any]:
    """The first step guesses the order 2, 1, 0; gradients come as 0, 2, 1."""
    module, events = Chain([1, 2, 0]), []
    reducer = reducer_of(module, Recorder(group, events), bucketing())
    for k, parameter in enumerate(module.w):
        parameter.register_post_accumulate_grad_hook(lambda _, k=k: events.append(f"ready {k}"))
    run(module, reducer)
    return events[:6]


def test_a_full_bucket_waits_for_those_before_it(threads) -> None:
    expected = ["ready 0", ("sum", 1), "ready 2", ("sum", 1), ("sum", 1), "ready 1"]
    assert threads(2, late_bucket) == [expected] * 2


class LateWork:
    """Ends, and puts its result where it belongs, no sooner than it is waited for."""

    def __init__(self, work: Any, result: Tensor, target: Tensor) -> None:
        self._work, self._result, self._target = work, result, target

    def wait(self) -> None:
        self._work.wait()
        time.sleep(0.01)
        self._target.copy_(self._result)


class PoisoningGroup:
    """Overwrites what it sums with NaN at once, and delivers late."""

    def __init__(self, group: ExchangeGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> LateWork:
        result = tensors[0].clone()
        work = self._group.allreduce([result], options)
        tensors[0].fill_(float("nan") if tensors[0].is_floating_point() else -1)
        return LateWork(work, result, tensors[0])


def poisoned(group: ExchangeGroup, audited: bool, find_unused: bool) -> list[list[float | None]]:
    module = Chain([1, 2, 0])
    chosen = bucketing(find_unused=find_unused)
    reducer = reducer_of(module, PoisoningGroup(group), chosen, audited=audited)
    found = []
    for _ in range(3):
        found.append(run(module, reducer, x=2.0 * group.rank()))
        module.zero_grad()
    return found


@pytest.mark.parametrize("audited", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
def test_nothing_is_read_from_a_bucket_before_its_exchange_has_ended(threads, audited, find_unused) -> None:
    # x is 0 and 2, so 1 on average. Audited, the exchange runs on a lane of its own.
    assert threads(2, poisoned, audited, find_unused) == [[[12.0, 8.0, 6.0]] * 3] * 2


def forgetting(group: ExchangeGroup, how: str) -> list[list[float | None]]:
    """Gradients of four steps, rank r with x = 2 r + step."""
    module = Chain([0, 1])
    reducer = reducer_of(module, group, bucketing(8, 8))
    found = []
    for step in range(4):
        found.append(run(module, reducer, x=2.0 * group.rank() + step))
        if how != "never":
            module.zero_grad(set_to_none=how == "to none")
    return found


@pytest.mark.parametrize(
    ("how", "sums"),
    [
        # x is 0 and 2, 1 and 3, ...: on average 1, 2, 3, 4; w is 2 and 3.
        ("to none", [1.0, 2.0, 3.0, 4.0]),
        ("to zero", [1.0, 2.0, 3.0, 4.0]),
        ("never", [1.0, 3.0, 6.0, 10.0]),
    ],
)
def test_gradients_may_be_forgotten_in_any_way_or_not_at_all(threads, how, sums) -> None:
    assert threads(2, forgetting, how) == [[[3.0 * x, 2.0 * x] for x in sums]] * 2


def accumulated(group: ExchangeGroup, to_none: bool) -> list[list[float | None]]:
    """Two backward passes a step; the first is not exchanged."""
    module = Chain([0, 1])
    reducer = reducer_of(module, group, bucketing(8, 8))
    found = []
    for _ in range(3):
        with torch.enable_grad():
            module(torch.tensor([10.0 * (group.rank() + 1)])).sum().backward()
        found.append(run(module, reducer, x=1.0))
        module.zero_grad(set_to_none=to_none)
    return found


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulated_gradients_are_exchanged_with_the_last(threads, to_none) -> None:
    # (10 + 20) / 2 + 1 = 16 times the other factor.
    assert threads(2, accumulated, to_none) == [[[48.0, 32.0]] * 3] * 2


def memory(group: ExchangeGroup) -> list[bool]:
    """Whether gradients are views of the bucket in use, before and after buckets are formed anew."""
    module = Chain([1, 0])
    reducer = reducer_of(module, group, bucketing(8, 8))
    found = []
    for _ in range(3):
        run(module, reducer)
        values = reducer._buckets[0].values
        for place, piece in enumerate(reducer._buckets[0].pieces):
            gradient = module.get_parameter(piece.name).grad
            found.append(gradient.data_ptr() == values[place].data_ptr())
        found.append(len(reducer._buckets) == 1)
    return found


def test_gradients_lie_in_the_bucket(threads) -> None:
    assert threads(2, memory) == [[True] * 9] * 2


def twice(group: ExchangeGroup) -> str:
    """Two backward passes, as reentrant checkpointing of a shared part has them too."""
    module = Chain([0])
    reducer = reducer_of(module, group, bucketing())
    try:
        with torch.enable_grad(), reducer.exchanging():
            for _ in range(2):
                module(torch.ones(1)).sum().backward()
    except UsageError as error:
        return str(error)
    return ""


def test_a_gradient_that_comes_twice_is_an_error(threads) -> None:
    for message in threads(1, twice):
        assert "the gradient of w.0 came twice" in message
        assert "use_reentrant=False" in message


class WaitedFor:
    """Work that notes when it has been waited for."""

    def __init__(self, work: Any, events: list[Any]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._work.wait()
        self._events.append("done")


class WatchfulGroup(Recorder):
    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return WaitedFor(super().allreduce(tensors, options), self.events)


def half_a_step(group: ExchangeGroup) -> tuple[list[Any], list[float | None], list[str]]:
    """A backward pass that fails after two of three gradients, and two that do not."""
    module, events = Chain([1, 2, 0]), []
    reducer = reducer_of(module, WatchfulGroup(group, events), bucketing())

    def fail(parameter: Tensor) -> None:
        raise ZeroDivisionError

    # Gradients come as 0, 2, 1, and buckets are expected as 2, 1, 0: that of 2 is under way.
    handle = module.w[1].register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run(module, reducer)
    handle.remove()
    left, events[:] = events.copy(), []
    module.zero_grad()
    run(module, reducer)
    module.zero_grad()
    gradients = run(module, reducer)
    return left, gradients, [bucket.pieces[0].name for bucket in reducer._buckets]


def test_a_failed_step_finishes_its_exchanges_and_does_not_count(threads) -> None:
    for left, gradients, names in threads(2, half_a_step):
        assert left.count("done") == left.count(("sum", 1)) > 0
        assert gradients == [12.0, 8.0, 6.0]
        assert names == ["w.0", "w.2", "w.1"]


def after_an_error(group: ExchangeGroup) -> list[float | None]:
    """A backward pass that fails on all ranks, and one outside of an exchange; then one that counts."""
    module = Chain([0, 1])
    reducer = reducer_of(module, group, bucketing(8, 8))
    with pytest.raises(ZeroDivisionError), reducer.exchanging():
        raise ZeroDivisionError
    before = group.traffic.operations
    with torch.enable_grad():
        module(torch.ones(1)).sum().backward()
    assert group.traffic.operations == before
    module.zero_grad()
    return run(module, reducer)


def test_outside_of_an_exchange_and_after_a_failed_one_nothing_is_sent(threads) -> None:
    assert threads(2, after_an_error) == [[3.0, 2.0]] * 2
