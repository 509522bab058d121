"""Data-parallel training over real ranks, against a serial loop over the replicas written out here."""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange import open_exchange
from strategies import Phase, Trainer, TrainSettings

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
STEPS = 3
UNIT_ROUNDOFF = 2.0**-24
SMALL = "bucket_mb=0.001"
"""About 260 floats: the models below have several buckets."""


class Normed(nn.Module):
    """BatchNorm: gradients depend on who is in a micro-batch with whom."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Dropped(Normed):
    """Dropout: gradients depend on each replica's own random state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Dropout(0.4)


class Shared(nn.Module):
    """One matrix in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.linear(self.b(torch.tanh(self.a(x))), self.a.weight))
        return y


class Unused(nn.Module):
    """`never` is used by no replica, `sometimes` in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if x[0, 0] > 0 else y


MODELS: dict[str, type[nn.Module]] = {
    "normed": Normed,
    "dropped": Dropped,
    "shared": Shared,
    "unused": Unused,
}


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def batch(step: int, micro: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + replica)
    return torch.randn(4, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def seed(step: int, replica: int) -> None:
    torch.manual_seed(1_000_000 + 10 * step + replica)


def copied(pairs: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in pairs}


def fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in module.parameters():
        digest.update(value.detach().numpy().tobytes())
    return digest.hexdigest()


def train(rank: int, model: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """On a rank: each step's start, gradients, loss and end."""
    module = build(model)
    chosen = TrainSettings(**settings)
    trainer = Trainer(module, F.cross_entropy, device=CPU, settings=chosen, group=open_exchange())
    steps = []
    for step in range(STEPS):
        start = copied(module.state_dict().items())
        seed(step, rank)
        loss = trainer.compute_gradients(batch(step, micro, rank) for micro in range(chosen.accumulation))
        gradients = copied(trainer.model.named_gradients())
        trainer.update()
        steps.append(
            {
                "start": start,
                "loss": loss.item(),
                "gradients": gradients,
                "parameters": copied(module.named_parameters()),
                "buffers": copied(module.named_buffers()),
                "fingerprint": fingerprint(module),
            }
        )
    return steps


class Serial:
    """The same on one process: replicas one after another, their gradients averaged in rank order."""

    def __init__(self, model: str, replicas: int, accumulation: int) -> None:
        self.module = build(model)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.replicas = replicas
        self.accumulation = accumulation

    def gradients(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The averages, and for each element the mean of the replicas' absolute values."""
        total: dict[str, Tensor] = {}
        size: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
        for replica in range(self.replicas):
            twin = self._replica(step, replica)
            for name, parameter in twin.named_parameters():
                if parameter.grad is not None:
                    share = parameter.grad / self.replicas
                    total[name] = total[name] + share if name in total else share
                    size[name] = size[name] + share.abs()
            if replica == 0:
                self.buffers = dict(twin.named_buffers())
        return total, size

    def _replica(self, step: int, replica: int) -> nn.Module:
        twin = copy.deepcopy(self.module)
        seed(step, replica)
        for micro in range(self.accumulation):
            inputs, targets = batch(step, micro, replica)
            (F.cross_entropy(twin(inputs), targets) / self.accumulation).backward()
        return twin

    def update(self, gradients: dict[str, Tensor], clip_norm: float | None) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients[name].clone() if name in gradients else None
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), clip_norm)
        self.optimizer.step()
        self.module.load_state_dict({**self.module.state_dict(), **self.buffers})


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "BatchNorm": ("normed", {}),
    "BatchNorm, accumulated": ("normed", {"accumulation": 2}),
    "dropout, small buckets": ("dropped", {"strategy": f"ddp:{SMALL}"}),
    "dropout, accumulated, gradients in buckets": (
        "dropped",
        {"accumulation": 2, "strategy": f"ddp:{SMALL}:bucket_view=true"},
    ),
    "shared, gradients in buckets": ("shared", {"strategy": "ddp:bucket_view=true"}),
    "shared, accumulated": ("shared", {"accumulation": 2, "strategy": f"ddp:{SMALL}"}),
    "unused": ("unused", {"strategy": "ddp:find_unused=true"}),
    "unused, accumulated": ("unused", {"accumulation": 2, "strategy": f"ddp:find_unused=true:{SMALL}"}),
    "static graph": ("normed", {"strategy": f"ddp:static_graph=true:{SMALL}"}),
    "clipped": ("shared", {"clip_norm": 0.05}),
}


def settings_of(case: str) -> tuple[str, dict[str, Any]]:
    model, settings = CASES[case]
    return model, {"strategy": "ddp", "optimizer": "sgd:lr=0.1:momentum=0.9", **settings}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(ranks: Ranks, case: str) -> None:
    # a + b = b + a, and halving is exact: with two replicas no order of the sum can differ.
    model, settings = settings_of(case)
    first, second = ranks(2, train, model, settings)
    serial = Serial(model, 2, settings.get("accumulation", 1))
    for step in range(STEPS):
        gradients, _ = serial.gradients(step)
        assert_same(first[step]["gradients"], gradients)
        assert_same(second[step]["gradients"], gradients)
        serial.update(gradients, settings.get("clip_norm"))
        assert_same(first[step]["parameters"], dict(serial.module.named_parameters()))
        assert_same(first[step]["buffers"], dict(serial.module.named_buffers()))
        assert first[step]["fingerprint"] == second[step]["fingerprint"]
        assert first[step]["loss"] != second[step]["loss"]


@pytest.mark.parametrize("case", CASES)
def test_three_ranks_agree_with_the_serial_loop_within_the_rounding_of_the_average(
    ranks: Ranks, case: str
) -> None:
    """Either side rounds each g_r / 3 and adds two such terms, in its own order: 3 factors (1 + d).

    DDP multiplies by the rounded 1/3, one factor more. With gamma(n) = n u / (1 - n u) (Higham, Accuracy
    and Stability of Numerical Algorithms, section 3.1) the sides differ by at most gamma(3) + gamma(4)
    times sum |g_r| / 3; that sum is itself rounded, so gamma(4) is taken for both.
    """
    model, settings = settings_of(case)
    results = ranks(3, train, model, settings)
    bound = 2 * 4 * UNIT_ROUNDOFF / (1 - 4 * UNIT_ROUNDOFF)
    for step in range(STEPS):
        serial = Serial(model, 3, settings.get("accumulation", 1))
        serial.module.load_state_dict(results[0][step]["start"])
        gradients, sizes = serial.gradients(step)
        for ours in (result[step]["gradients"] for result in results):
            assert ours.keys() == gradients.keys()
            for name, gradient in ours.items():
                assert bool(((gradient - gradients[name]).abs() <= bound * sizes[name]).all()), name
        assert_same(results[0][step]["buffers"], serial.buffers)
        assert len({result[step]["fingerprint"] for result in results}) == 1


def test_the_data_let_replicas_use_different_parameters() -> None:
    # What the cases named "unused" stand on: in some step one replica uses `sometimes`, the other not.
    used = [[bool(batch(step, 0, replica)[0][0, 0] > 0) for replica in range(2)] for step in range(STEPS)]
    assert any(first != second for first, second in used)


def test_a_parameter_that_no_replica_uses_has_no_gradient_and_stays(ranks: Ranks) -> None:
    model, settings = settings_of("unused, accumulated")
    first, _ = ranks(2, train, model, settings)
    assert "always.weight" in first[-1]["gradients"]
    assert "never.weight" not in first[-1]["gradients"]
    assert torch.equal(first[-1]["parameters"]["never.weight"], first[0]["start"]["never.weight"])


def integer_step(rank: int, strategy: str) -> dict[str, Tensor]:
    """On a rank: one SGD step of y = W x with the loss size * sum(y t), whose gradient is size * t x."""
    size = torch.distributed.get_world_size()
    module = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return size * (outputs * targets).sum()

    settings = TrainSettings(strategy=strategy, optimizer="sgd:lr=0.5:momentum=0")
    trainer = Trainer(module, loss, device=CPU, settings=settings, group=open_exchange())
    trainer.step(iter([(torch.tensor([[rank + 1.0, 7.0, 0.0]]), torch.tensor([[1.0, rank - 1.0]]))]))
    return copied(module.named_parameters())


@pytest.mark.parametrize("strategy", ["ddp", "ddp:bucket_mb=0.001:bucket_view=true"])
@pytest.mark.parametrize(
    ("size", "weight"),
    [
        # The average is the sum of t x over the ranks, with t = (1, r - 1) and x = (r + 1, 7, 0); W - g / 2.
        # Two ranks: (1 + 2, 7 + 7, 0) and (-1 * 1 + 0 * 2, -7 + 0, 0).
        (2, [[1 - 1.5, 2 - 7.0, 3.0], [4 + 0.5, 5 + 3.5, 6.0]]),
        # Three ranks: (1 + 2 + 3, 7 + 7 + 7, 0) and (-1 * 1 + 0 * 2 + 1 * 3, -7 + 0 + 7, 0).
        (3, [[1 - 3.0, 2 - 10.5, 3.0], [4 - 1.0, 5.0, 6.0]]),
    ],
)
def test_integer_gradients_are_averaged_exactly_on_any_number_of_ranks(
    ranks: Ranks, size: int, weight: list[list[float]], strategy: str
) -> None:
    # k = 3 k * fl(1/3) exactly: fl(1/3) is off by 2^-25 of it, less than half of k's last place.
    for parameters in ranks(size, integer_step, strategy):
        assert torch.equal(parameters["weight"], torch.tensor(weight))


def options_in_force(rank: int, strategy: str) -> list[object]:
    """On a rank: static graph, unused search, and whether a gradient lies in a bucket with others."""
    module = build("shared")
    settings = TrainSettings(strategy=strategy)
    trainer = Trainer(module, F.cross_entropy, device=CPU, settings=settings, group=open_exchange())
    trainer.compute_gradients(iter([batch(0, 0, rank)]))
    gradient: Any = module.head.bias.grad  # type: ignore[union-attr]
    wrapper: Any = trainer.model.module
    in_bucket = gradient.untyped_storage().nbytes() > gradient.nbytes
    return [wrapper.static_graph, wrapper.find_unused_parameters, in_bucket]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", [False, False, False]),
        ("ddp:static_graph=true", [True, False, False]),
        ("ddp:find_unused=true", [False, True, False]),
        ("ddp:bucket_view=true", [False, False, True]),
    ],
)
def test_options_of_the_spec_reach_torch(ranks: Ranks, strategy: str, expected: list[bool]) -> None:
    assert ranks(2, options_in_force, strategy) == [expected] * 2


class Counter:
    """Notes how many exchanges there have been whenever a phase begins."""

    def __init__(self, exchange: Any) -> None:
        self.exchange = exchange
        self.seen: list[tuple[str, int]] = []

    def begins(self, phase: Phase) -> None:
        self.seen.append((phase.value, self.exchange.operations))

    def step_done(self, loss: Tensor) -> None:
        self.seen.append(("done", self.exchange.operations))


def count_exchanges(rank: int, strategy: str) -> list[tuple[str, int]]:
    """On a rank: the third step of three micro-batches, exchanges counted from its start.

    In the second, DDP sends once the order in which gradients became ready in the first.
    """
    module, exchange = build("shared"), open_exchange()
    settings = TrainSettings(strategy=strategy, accumulation=3)
    trainer = Trainer(module, F.cross_entropy, device=CPU, settings=settings, group=exchange)
    for step in range(2):
        trainer.step(batch(step, micro, rank) for micro in range(3))
    exchange.reset()
    trainer.observer = counter = Counter(exchange)
    trainer.step(batch(2, micro, rank) for micro in range(3))
    return counter.seen


@pytest.mark.parametrize("strategy", ["ddp", "ddp:bucket_view=true", "ddp:find_unused=true"])
def test_nothing_is_exchanged_before_the_last_micro_batch(ranks: Ranks, strategy: str) -> None:
    for seen in ranks(2, count_exchanges, strategy):
        before = ["data", "forward", "backward"] * 3
        assert seen[:9] == [(phase, 0) for phase in before]
        # The model is one bucket; find_unused adds one exchange, of who used what.
        exchanges = 2 if "find_unused" in strategy else 1
        assert seen[9:] == [("optimizer", exchanges), ("done", exchanges)]
