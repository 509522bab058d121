"""Local SGD: averages of replicas against serial loops, float64 means and figures worked out here."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from strategies import Trainer, TrainSettings
from strategies.exchange import buckets

Threads = Callable[..., list[Any]]
CPU = torch.device("cpu")
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


class Unused(nn.Module):
    """`never` is used by no replica, `sometimes` in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if x[0, 0] > 0 else y


MODELS: dict[str, type[nn.Module]] = {"normed": Normed, "images": Images, "unused": Unused}


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


def copied(pairs: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in pairs}


class Replica:
    """A rank that trains step after step."""

    def __init__(self, group: ExchangeGroup, module: nn.Module, **settings: Any) -> None:
        chosen = TrainSettings(**settings)
        with torch.enable_grad():
            twin = copy.deepcopy(module)
            self.trainer = Trainer(twin, F.cross_entropy, device=CPU, settings=chosen, group=group)
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


def train(group: ExchangeGroup, module: nn.Module, steps: int, settings: dict[str, Any]) -> list[Moment]:
    """On a rank: what it has after each step."""
    replica = Replica(group, module, **settings)
    return [replica.step(step) for step in range(steps)]


class Serial:
    """Replicas one after another, each with its optimizer; averages by the formula, in rank order."""

    def __init__(self, module: nn.Module, replicas: int, accumulation: int = 1) -> None:
        self.twins = [copy.deepcopy(module) for _ in range(replicas)]
        self.optimizers = [torch.optim.SGD(t.parameters(), lr=0.1, momentum=0.9) for t in self.twins]
        self.accumulation = accumulation
        self.common = copied(module.state_dict().items())

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
                new = last + share
            self.common[name] = new
            for value in values:
                value.copy_(new)


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


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
    ],
)
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(
    threads: Threads,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    accumulation: int,
    averages: set[int],
    bucket_bytes: int,
) -> None:
    # a + b = b + a, and halving is exact. Parameters, statistics, counters, and each rank's own momentum.
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
    module = build("normed")
    results = threads(2, train, module, 7, {"strategy": strategy, "accumulation": accumulation})
    serial = Serial(module, 2, accumulation)
    warmup = int(strategy.partition("warmup=")[2] or 0)
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
    threads: Threads, monkeypatch: pytest.MonkeyPatch, size: int, model: str, settings: dict[str, Any]
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


def integer_steps(group: ExchangeGroup) -> list[Tensor]:
    """On a rank: four SGD steps of y = W x by the loss p * sum(y t), whose gradient is p * t x."""
    module = nn.Linear(2, 1, bias=False)
    module.weight.data = torch.tensor([[1.0, 2.0]])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return group.size() * (outputs * targets).sum()

    settings = TrainSettings(strategy="local-sgd:2", optimizer="sgd:lr=1:momentum=0")
    trainer = Trainer(module, loss, device=CPU, settings=settings, group=group)
    weights = []
    for step in range(4):
        with torch.enable_grad():
            inputs = torch.tensor([[group.rank() + 1.0, step * 7.0]])
            trainer.step(iter([(inputs, torch.ones(1, 1))]))
        weights.append(module.weight.detach().clone())
    return weights


@pytest.mark.parametrize("size", [2, 3, 4])
def test_integers_are_averaged_exactly_on_any_number_of_ranks(threads: Threads, size: int) -> None:
    # Rank r goes by -p (r + 1, 7 s) in step s: by -(r + 1, 7 s) after the division by p, all of it whole.
    ranks = size * (size + 1) // 2
    expected = {1: [1.0 - 2 * ranks, 2.0 - 7.0 * size], 3: [1.0 - 4 * ranks, 2.0 - (7.0 + 14 + 21) * size]}
    for rank, weights in enumerate(threads(size, integer_steps)):
        assert weights[0].tolist() == [[1.0 - size * (rank + 1), 2.0]]
        assert weights[1].tolist() == [expected[1]]
        assert weights[2].tolist() == [[expected[1][0] - size * (rank + 1), expected[1][1] - size * 14.0]]
        assert weights[3].tolist() == [expected[3]]


def train_process(rank: int, model: str, steps: int, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """On a rank that is a process, as DDP wants it: the parameters after each step."""
    return [state.parameters for state in train(open_exchange(), build(model), steps, settings)]


@pytest.mark.parametrize("size", [2, 3])
def test_an_average_after_every_step_of_plain_sgd_is_data_parallelism(ranks: Threads, size: int) -> None:
    """mean(w - lr g_r) = w - lr mean(g_r), up to the rounding of w in each of 4 steps.

    Either side rounds w a few times a step, by u each; a factor of 20 is for what later gradients make of
    it. A wrong divisor, or an average left out, would be off by the way itself, which is a tenth of w.
    """
    plain = {"optimizer": "sgd:lr=0.1:momentum=0"}
    ours = ranks(size, train_process, "normed", 4, {"strategy": "local-sgd:1", **plain})[0]
    ddp = ranks(size, train_process, "normed", 4, {"strategy": "ddp", **plain})[0]
    start = torch.cat([value.flatten() for value in build("normed").parameters()]).detach()
    for mine, theirs in zip(ours, ddp, strict=True):
        w, v = (torch.cat([value.flatten() for value in side.values()]) for side in (mine, theirs))
        assert float((w - v).norm()) <= 20 * 4 * UNIT_ROUNDOFF * float(v.norm())
    assert float((v - start).norm()) > 0.01 * float(start.norm())


@pytest.mark.parametrize(("model", "ddp"), [("normed", "ddp"), ("unused", "ddp:find_unused=true")])
def test_the_warm_up_is_ddp_and_no_step_after_it(ranks: Threads, model: str, ddp: str) -> None:
    # Momentum and decay move a parameter whose gradient is zero, but not one without a gradient.
    settings = {"optimizer": "sgd:lr=0.1:momentum=0.9:weight_decay=0.01", "accumulation": 2}
    ours = ranks(2, train_process, model, 5, {"strategy": "local-sgd:2:warmup=3", **settings})
    theirs = ranks(2, train_process, model, 5, {"strategy": ddp, **settings})
    for rank in range(2):
        for step in range(3):
            assert_same(ours[rank][step], theirs[rank][step])
        for step in (3, 4):
            assert not torch.equal(*(next(iter(side[rank][step].values())) for side in (ours, theirs)))
