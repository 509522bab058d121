"""Local SGD: averages of replicas against serial loops, float64 means and figures worked out by hand."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import data_parallel as replicas
import pytest
import torch
from data_parallel import assert_same, copied
from rank_builders import a_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from strategies.catalog import STRATEGIES
from strategies.exchange import buckets

UNIT_ROUNDOFF = 2.0**-24
SMALL = 400
"""Bytes of a bucket, so that the models below have several."""


class Normed(nn.Sequential):
    """BatchNorm: two statistics and a counter."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))


class Images(nn.Sequential):
    """Convolutions, which may lie in memory channels last."""

    def __init__(self) -> None:
        super().__init__(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2), nn.Flatten(), nn.Linear(6, 5))


MODELS: dict[str, type[nn.Module]] = {"normed": Normed, "images": Images, "unused": replicas.Unused}


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def batch(step: int, micro: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + replica)
    return torch.randn(4, 8, generator=generator), torch.randint(5, (4,), generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All that a rank has after a step."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    momentum: dict[str, Tensor]
    updated: dict[str, Tensor]
    """The parameters as the optimizer left them, before anything that the strategy did."""

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for value in self.parameters.values():
            digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()


class Replica:
    """A rank that trains step after step."""

    def __init__(self, group: ExchangeGroup, module: nn.Module, **settings: Any) -> None:
        with torch.enable_grad():
            twin = copy.deepcopy(module)
            self.trainer = a_trainer(twin, F.cross_entropy, group=group, **settings)
        self.model: Any = self.trainer.model
        self.rank = group.rank()
        self._updated: dict[str, Tensor] = {}
        self._then = self.model.updated
        self.model.updated = self._told

    def _told(self) -> None:
        self._updated = copied(self.model.bare.named_parameters())
        self._then()

    def step(self, step: int) -> Moment:
        with torch.enable_grad():
            self.trainer.step(batch(step, i, self.rank) for i in range(self.trainer.settings.accumulation))
        return self.state()

    def state(self) -> Moment:
        bare = self.model.bare
        states = self.trainer.optimizer.state
        momentum = {name: states[p].get("momentum_buffer") for name, p in bare.named_parameters()}
        return Moment(
            parameters=copied(bare.named_parameters()),
            buffers=copied(bare.named_buffers()),
            momentum={name: value.clone() for name, value in momentum.items() if value is not None},
            updated=self._updated,
        )

    @property
    def parameters(self) -> dict[str, Tensor]:
        return copied(self.model.bare.named_parameters())

    @property
    def everything(self) -> dict[str, Tensor]:
        """Parameters, buffers and momentum."""
        optimizer = self.trainer.optimizer.state_dict()["state"]
        momentum = {f"momentum {key}": state["momentum_buffer"] for key, state in optimizer.items()}
        return copied([*self.model.bare.state_dict().items(), *momentum.items()])

    def update(self, step: int) -> dict[str, Tensor]:
        """Take a step without what the strategy does after it, and return the parameters."""
        with torch.enable_grad():
            self.trainer.compute_gradients(iter([batch(step, 0, self.rank)]))
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        return self.parameters


def train(group: ExchangeGroup, module: nn.Module, steps: int, settings: dict[str, Any]) -> list[Moment]:
    """On a rank: what it has after each step."""
    replica = Replica(group, module, **settings)
    return [replica.step(step) for step in range(steps)]


class Serial:
    """Replicas one after another, each with its optimizer; averages by the formula, in rank order, or outer
    steps of torch's SGD, one parameter after another."""

    def __init__(
        self, module: nn.Module, replicas: int, accumulation: int = 1, outer: dict[str, Any] | None = None
    ) -> None:
        self.twins = [copy.deepcopy(module) for _ in range(replicas)]
        self.optimizers = [torch.optim.SGD(t.parameters(), lr=0.1, momentum=0.9) for t in self.twins]
        self.accumulation = accumulation
        self.common = copied(module.state_dict().items())
        self.outer = {
            name: torch.optim.SGD([nn.Parameter(value.detach().clone())], nesterov=True, **outer)
            for name, value in (module.named_parameters() if outer else ())
        }

    def compute_gradients(self, step: int) -> None:
        for replica, (twin, optimizer) in enumerate(zip(self.twins, self.optimizers, strict=True)):
            optimizer.zero_grad()
            for micro in range(self.accumulation):
                inputs, targets = batch(step, micro, replica)
                (F.cross_entropy(twin(inputs), targets) / self.accumulation).backward()

    def average_gradients(self) -> None:
        for parameters in zip(*(twin.parameters() for twin in self.twins), strict=True):
            present = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if present:
                total = sum(gradient / len(parameters) for gradient in present)
                for parameter in parameters:
                    parameter.grad = total.clone()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def average(self, *, parameters: bool = True) -> None:
        trained = {name for name, _ in self.twins[0].named_parameters()}
        for name, last in self.common.items():
            values = [twin.state_dict()[name] for twin in self.twins]
            if not last.is_floating_point() or (name in trained and not parameters):
                new = values[0].clone()
            else:
                share = (values[0] - last) / len(values)
                for value in values[1:]:
                    share = share + (value - last) / len(values)
                new = self.step(name, last, -share) if name in self.outer else last + share
            self.common[name] = new
            for value in values:
                value.copy_(new)

    def step(self, name: str, last: Tensor, gradient: Tensor) -> Tensor:
        """Take an outer step from `last` with a gradient of (last average - mean of the replicas)."""
        [parameter] = self.outer[name].param_groups[0]["params"]
        parameter.copy_(last)
        parameter.grad = gradient
        self.outer[name].step()
        return parameter.detach().clone()


def assert_is(state: Moment, twin: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert_same(state.parameters, dict(twin.named_parameters()))
    assert_same(state.buffers, dict(twin.named_buffers()))
    momentum = {name: optimizer.state[p].get("momentum_buffer") for name, p in twin.named_parameters()}
    assert_same(state.momentum, {name: value for name, value in momentum.items() if value is not None})


@pytest.mark.parametrize("bucket_bytes", [buckets.BUCKET_BYTES, SMALL])
@pytest.mark.parametrize(
    ("strategy", "accumulation", "averages"),
    [
        ("local-sgd:1", 1, {1, 2, 3, 4, 5, 6, 7}),
        ("local-sgd:3", 1, {3, 6}),
        ("local-sgd:3", 2, {3, 6}),
        # After two steps of exchanged gradients the first average is three steps away.
        ("local-sgd:3:warmup=2", 1, {5}),
        ("local-sgd:2:warmup=3", 2, {5, 7}),
        # The second and third outer steps have momentum.
        ("local-sgd:2:outer=nesterov", 1, {2, 4, 6}),
        ("local-sgd:2:outer=nesterov:outer_lr=0.3:outer_momentum=0.5:warmup=1", 2, {3, 5, 7}),
    ],
)
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(
    threads, monkeypatch, strategy, accumulation, averages, bucket_bytes
) -> None:
    # a + b = b + a, and halving is exact. Parameters, statistics, counters, and each rank's own momentum.
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
    module = build("normed")
    results = threads(2, train, module, 7, {"strategy": strategy, "accumulation": accumulation})
    given = dict(part.split("=") for part in strategy.split(":") if "=" in part)
    outer = {"lr": float(given.get("outer_lr", 0.7)), "momentum": float(given.get("outer_momentum", 0.9))}
    serial = Serial(module, 2, accumulation, outer if "outer" in given else None)
    warmup = int(given.get("warmup", 0))
    for step in range(7):
        serial.compute_gradients(step)
        if step < warmup:
            serial.average_gradients()
        serial.update()
        if step < warmup:
            # Parameters are equal already; statistics are brought together.
            serial.common |= copied(serial.twins[0].named_parameters())
            serial.average(parameters=False)
        elif step + 1 in averages:
            serial.average()
        for result, twin, optimizer in zip(results, serial.twins, serial.optimizers, strict=True):
            assert_is(result[step], twin, optimizer)
        together = step < warmup or step + 1 in averages
        assert (results[0][step].fingerprint == results[1][step].fingerprint) is together
        # Exchanged gradients make equal momentum; averaged parameters do not.
        assert torch.equal(*(result[step].momentum["0.weight"] for result in results)) is (step < warmup)


def outer_steps(group: ExchangeGroup) -> list[tuple[float, float]]:
    """On a rank: a weight and its outer momentum after each of four steps, each of which moves it by 0.1
    times (rank + 1) towards 0."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    settings = {"strategy": "local-sgd:2:outer=nesterov", "optimizer": "sgd:lr=0.1:momentum=0"}
    trainer, found = a_trainer(module, F.l1_loss, group=group, **settings), []
    for _ in range(4):
        with torch.enable_grad():
            trainer.step(iter([(torch.tensor([[group.rank() + 1.0]]), torch.zeros(1, 1))]))
        [(_, momentum)] = trainer.model.named_outer_state()
        found.append((trainer.model.bare.weight.item(), momentum.item()))
    return found


def test_two_outer_steps_by_hand(threads) -> None:
    """From 1 to 0.8 and 0.6, an outer gradient of 0.3: m = 0.3, and 1 - 0.7 (0.3 + 0.9 m) = 0.601. Again 0.3:
    m = 0.27 + 0.3, and 0.601 - 0.7 (0.3 + 0.9 m) = 0.0319."""
    for rank, found in enumerate(threads(2, outer_steps)):
        own = 0.1 * (rank + 1)
        expected = [(1 - own, 0), (0.601, 0.3), (0.601 - own, 0.3), (0.0319, 0.57)]
        assert [each for pair in found for each in pair] == pytest.approx(
            [each for pair in expected for each in pair], abs=1e-6
        )


def assert_means(
    before: list[dict[str, Tensor]], after: Mapping[str, Tensor], last: Mapping[str, Tensor]
) -> None:
    """`after` is the mean of `before` within u |after| + gamma(p + 1) sum |before - last| / p.

    Of each term x_r - last its difference is rounded, its share, and p - 1 sums: p + 1 factors (1 + d) with
    |d| <= u, so gamma(p + 1) = (p + 1) u / (1 - (p + 1) u) (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1). The last sum is rounded once more. 2^-126 covers shares too small to be normal.
    """
    size = len(before)
    gamma = (size + 1) * UNIT_ROUNDOFF / (1 - (size + 1) * UNIT_ROUNDOFF)
    for name, value in after.items():
        values = torch.stack([parameters[name].double() for parameters in before])
        way = (values - last[name].double()).abs().mean(0)
        bound = UNIT_ROUNDOFF * value.double().abs() + gamma * way + 2.0**-126
        assert bool(((value.double() - values.mean(0)).abs() <= bound).all()), name


@pytest.mark.parametrize("size", [1, 3, 4, 5])
@pytest.mark.parametrize(
    ("model", "settings"),
    [("normed", {}), ("images", {"memory_format": "channels_last"}), ("unused", {"optimizer": "adamw"})],
)
def test_after_each_period_all_replicas_are_their_mean_and_the_same_bits(
    threads, monkeypatch, size, model, settings
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    module = build(model)
    results = threads(size, train, module, 6, {"strategy": "local-sgd:2", **settings})
    last: Mapping[str, Tensor] = copied(module.named_parameters())
    for step, states in enumerate(zip(*results, strict=True)):
        prints = {state.fingerprint for state in states}
        if step % 2 == 0:
            assert len(prints) == size
            for state in states:
                assert_same(state.parameters, state.updated)
        else:
            assert len(prints) == 1
            assert_means([state.updated for state in states], states[0].parameters, last)
            last = states[0].parameters


def train_process(rank: int, model: str, steps: int, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """On a rank that is a process, as DDP wants it: the parameters after each step."""
    return [state.parameters for state in train(open_exchange(), build(model), steps, settings)]


@pytest.mark.parametrize(("model", "ddp"), [("normed", "ddp"), ("unused", "ddp:find_unused=true")])
def test_the_warm_up_is_ddp_and_no_step_after_it(ranks, model, ddp) -> None:
    # Momentum and decay move a parameter whose gradient is zero, but not one without a gradient.
    settings = {"optimizer": "sgd:lr=0.1:momentum=0.9:weight_decay=0.01", "accumulation": 2}
    ours = ranks(2, train_process, model, 5, {"strategy": "local-sgd:2:warmup=3", **settings})
    theirs = ranks(2, train_process, model, 5, {"strategy": ddp, **settings})
    for rank in range(2):
        for step in range(3):
            assert_same(ours[rank][step], theirs[rank][step])
        for step in (3, 4):
            assert not torch.equal(*(next(iter(side[rank][step].values())) for side in (ours, theirs)))


# Local SGD apart from its parameters: buffers, traffic, settling, compressed differences, a saved state.

Tensors = dict[str, Tensor]


def state_build(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Normed()


def phases(group: ExchangeGroup, strategy: str, compression: str) -> list[Any]:
    """On a rank: the layout's period and ramp, and before each step whether it exchanges gradients."""
    replica = Replica(group, state_build(), strategy=strategy, compression=compression)
    said = []
    for step in range(4):
        said.append(STRATEGIES.facts(strategy).promise.averages_all_gradients(step))
        replica.step(step)
    return [replica.model.period, replica.model.ramp_steps, said]


@pytest.mark.parametrize(
    ("strategy", "compression", "expected"),
    [
        ("local-sgd:3", "none", [3, 0, [False, False, False, False]]),
        ("local-sgd:4:warmup=2", "none", [4, 2, [True, True, False, False]]),
        # A compressor's own ramp of three exchanges is three periods.
        ("local-sgd:4:warmup=2", "powersgd:1:warmup=3", [4, 2 + 3 * 4, [True, True, False, False]]),
    ],
)
def test_local_sgd_states_its_period_its_ramp_and_its_exchanging_steps(
    threads, strategy, compression, expected
) -> None:
    assert threads(2, phases, strategy, compression) == [expected] * 2


class Stateful(nn.Module):
    """A linear model with every kind of buffer; `total`, `late` and `seen` change with what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("late", torch.zeros(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int16))
        self.register_buffer("table", torch.linspace(0.1, 9.7, 1000))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("keep", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum()
        self.late = self.late + x.sum()
        self.seen += int(x.sum())
        return self.head(x)


def buffers_after(group: ExchangeGroup, strategy: str) -> list[Tensors]:
    """On a rank: the buffers after each of four steps, in which rank r feeds in r + 1."""
    trainer = a_trainer(Stateful(), F.l1_loss, group=group, strategy=strategy, optimizer="sgd:lr=0")
    after = []
    for _ in range(4):
        with torch.enable_grad():
            trainer.step(iter([(torch.tensor([[group.rank() + 1.0]]), torch.zeros(1, 1))]))
        after.append(copied(trainer.model.bare.named_buffers()))
    return after


def test_statistics_become_their_mean_and_other_buffers_those_of_rank_0(threads) -> None:
    for rank, after in enumerate(threads(3, buffers_after, "local-sgd:2")):
        own = rank + 1.0
        # Ranks add 1, 2 and 3: 2 on average, in each of four steps. Rank 0 counts by 1.
        assert [buffers["total"].item() for buffers in after] == [own, 4, 4 + own, 8]
        assert [buffers["late"].item() for buffers in after] == [own, 4, 4 + own, 8]
        assert [buffers["seen"].item() for buffers in after] == [own, 2, 2 + own, 4]
        for name in ("table", "turns", "mask", "keep", "nothing"):
            assert torch.equal(after[-1][name], getattr(Stateful(), name)), name


def test_statistics_come_together_after_each_step_of_the_warm_up(threads) -> None:
    for rank, after in enumerate(threads(3, buffers_after, "local-sgd:2:warmup=2")):
        own = rank + 1.0
        assert [buffers["total"].item() for buffers in after] == [2, 4, 4 + own, 8]
        assert [buffers["seen"].item() for buffers in after] == [1, 2, 2 + own, 4]


def start_of(group: ExchangeGroup, modules: list[nn.Module]) -> Tensors:
    replica = Replica(group, modules[group.rank()], strategy="local-sgd:2")
    return copied(replica.model.bare.state_dict().items())


def test_all_ranks_start_from_rank_0(threads) -> None:
    modules = [state_build(seed) for seed in range(3)]
    for seed, module in enumerate(modules):
        module[0].weight.requires_grad_(False)
        module[1].running_mean.fill_(seed)
        module[1].num_batches_tracked.fill_(seed)
    for start in threads(3, start_of, modules):
        assert_same(start, modules[0].state_dict())


def traffic_of(group: ExchangeGroup, module: nn.Module, strategy: str) -> list[tuple[int, int]]:
    """On a rank: bytes and operations of each of three steps."""
    replica = Replica(group, module, strategy=strategy)
    counted = []
    for step in range(3):
        group.traffic.payload_bytes = group.traffic.operations = 0
        replica.step(step)
        counted.append((group.traffic.payload_bytes, group.traffic.operations))
    return counted


def test_the_bytes_and_messages_of_local_sgd(threads, monkeypatch) -> None:
    module = state_build()
    # Parameters 8 * 12 + 12 + 12 + 12 + 12 * 5 + 5 = 197, statistics 2 * 12, of 4 bytes; a counter of 8.
    average = 4 * 197 + 4 * 24 + 8
    assert threads(2, traffic_of, module, "local-sgd:2") == [[(0, 0), (average, 3), (0, 0)]] * 2
    # In the warm-up gradients, who has one (6 parameters), statistics and the counter.
    warm = 4 * 197 + 4 * 6 + 4 * 24 + 8
    assert threads(2, traffic_of, module, "local-sgd:2:warmup=1") == [[(warm, 4), (0, 0), (average, 3)]] * 2
    # Three buckets of parameters, of at most 400 bytes: 384, 48 + 48 + 48 + 240 and 20.
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    assert threads(2, traffic_of, module, "local-sgd:1") == [[(average, 5)] * 3] * 2
    # What is not trained does not differ.
    module[0].weight.requires_grad_(False)
    assert threads(2, traffic_of, module, "local-sgd:1") == [[(average - 384, 4)] * 3] * 2


def settled(group: ExchangeGroup) -> list[Any]:
    """On a rank: operations of settling, two of five steps, settling twice, and five more steps; and the
    parameters after each of these."""
    replica = Replica(group, state_build(), strategy="local-sgd:5")
    operations, parameters = [], []
    for action in ("settle", 0, 1, "settle", "settle", 2, 3, 4, 5, 6):
        group.traffic.operations = 0
        replica.model.settle() if action == "settle" else replica.step(action)
        operations.append(group.traffic.operations)
        parameters.append(replica.everything)
    return [operations, parameters]


def test_settling_averages_now_and_once(threads) -> None:
    results = threads(2, settled)
    # Parameters, statistics, counter: 3 operations. The next average is five steps after.
    assert [operations for operations, _ in results] == [[0, 0, 0, 3, 0, 0, 0, 0, 0, 3]] * 2
    (_, first), (_, second) = results
    for before, after in ((2, 3), (8, 9)):
        assert not torch.equal(first[before]["0.weight"], second[before]["0.weight"])
        for name in state_build().state_dict():
            assert torch.equal(first[after][name], second[after][name])
    mean = (first[2]["0.weight"].double() + second[2]["0.weight"]) / 2
    assert torch.allclose(first[3]["0.weight"].double(), mean, rtol=2 * UNIT_ROUNDOFF, atol=2 * UNIT_ROUNDOFF)
    assert_same(first[4], first[3])


def books(group: ExchangeGroup, compression: str) -> list[dict[str, Tensors]]:
    """On a rank: of four averages what went in, the residual before and after it, and what came out."""
    replica = Replica(group, state_build(), strategy="local-sgd:2", compression=compression)
    exchange, last, pages = replica.model.gradient_exchange, replica.parameters, []
    for average in range(4):
        replica.step(2 * average)
        carried = copied(exchange.carried())
        own = replica.update(2 * average + 1)
        replica.model.updated()
        new, residual = replica.parameters, copied(exchange.residual())
        pages.append({"last": last, "carried": carried, "own": own, "new": new, "residual": residual})
        last = new
    return pages


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("compression", ["topk:0.5", "randomk:0.3"])
def test_a_compressor_gets_the_differences_and_what_it_left_comes_back(
    threads, monkeypatch, size, compression
) -> None:
    """sum of (x_r - a) / p + sum of the residuals before = what was applied + sum of the residuals after."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SMALL)
    results = threads(size, books, compression)
    for pages in zip(*results, strict=True):
        for page in pages:
            assert_same(page["new"], pages[0]["new"])
        for name, last in pages[0]["last"].items():
            new = pages[0]["new"][name].double()
            shares = [(page["own"][name].double() - last) / size for page in pages]
            carried = [page["carried"][name].double() for page in pages if page["carried"]]
            residual = [page["residual"][name].double() for page in pages]
            difference = sum(shares) + sum(carried) - (new - last) - sum(residual)
            # Each term is rounded fewer than 8 times, and the parameters once.
            sizes = sum(part.abs() for part in shares + carried + residual)
            bound = 8 * UNIT_ROUNDOFF * sizes + UNIT_ROUNDOFF * new.abs()
            assert bool((difference.abs() <= bound).all()), name
    # Each average has a residual, which is added to the next.
    for pages in results:
        for page, following in itertools.pairwise(pages):
            assert all(bool(page["residual"][name].count_nonzero()) for name in ("0.weight", "3.weight"))
            assert_same(following["carried"], page["residual"])


def interrupted(group: ExchangeGroup, strategy: str, compression: str, at: int) -> list[list[Tensors]]:
    """On a rank: steps `at` to 8 of one trainer, and of a second that takes over what the first had then."""
    settings = {"strategy": strategy, "compression": compression}
    first = Replica(group, state_build(), **settings)
    for step in range(at):
        first.step(step)
    module, optimizer = (
        copy.deepcopy(part.state_dict()) for part in (first.model.bare, first.trainer.optimizer)
    )
    state = first.model.strategy_state()
    second = Replica(group, state_build(1), **settings)
    after = []
    for replica in (first, second):
        if replica is second:
            second.model.bare.load_state_dict(module)
            second.trainer.optimizer.load_state_dict(optimizer)
            second.model.load_strategy_state(state)
        after.append([])
        for step in range(at, 9):
            replica.step(step)
            after[-1].append(replica.everything)
    return after


@pytest.mark.parametrize("compression", ["none", "topk:0.5", "powersgd:1"])
@pytest.mark.parametrize(
    ("strategy", "at"), [("local-sgd:3", 5), ("local-sgd:3", 6), ("local-sgd:2:warmup=4", 2)]
)
def test_training_goes_on_from_a_saved_state_bit_for_bit(threads, strategy, at, compression) -> None:
    for uninterrupted, resumed in threads(2, interrupted, strategy, compression, at):
        for ours, theirs in zip(resumed, uninterrupted, strict=True):
            assert_same(ours, theirs)


def alone(group: ExchangeGroup) -> list[Any] | None:
    """On rank 0: after a step of warm-up four more with the exchange off, while rank 1 does nothing."""
    replica = Replica(group, state_build(), strategy="local-sgd:2:warmup=1")
    replica.step(0)
    if group.rank() == 1:
        return None
    start, before = replica.parameters, group.traffic.payload_bytes
    group.traffic.enabled = False
    replica.step(1)
    own = replica.update(2)
    replica.model.updated()
    end = replica.parameters
    replica.step(3)
    replica.step(4)
    return [start, own, end, group.traffic.payload_bytes - before]


def test_with_the_exchange_off_a_rank_averages_with_nobody(threads) -> None:
    start, own, end, counted = threads(2, alone)[0]
    # Its own share is all there is: half of the way that it went.
    assert_same(end, {name: start[name] + (value - start[name]) / 2 for name, value in own.items()})
    assert counted == 0
