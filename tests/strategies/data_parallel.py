"""Helpers for tests of data-parallel strategies: small models, their training on ranks, and a serial loop."""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from harness.worker.cell.setup import seed_torch
from harness.worker.exchange.group import ExchangeGroup, open_exchange
from results.layout import ModelLayout
from strategies import Phase, Trainer, TrainSettings

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
        return self.layers(x)


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
        return self.head(F.linear(self.b(torch.tanh(self.a(x))), self.a.weight))


class Unused(nn.Module):
    """`never` is used by no replica, `sometimes` in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if x[0, 0] > 0 else y


class Mixed(nn.Module):
    """Single and double precision in turn, and a matrix that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 5)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.tanh(self.a(self.fixed(x))).double()).float())


class Embedded(nn.Module):
    """A table whose gradient is sparse: a replica's micro-batch meets some of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 6, sparse=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((4 * x.abs()).long().clamp(max=11)).mean(1))


class Images(nn.Module):
    """Convolutions, whose parameters may lie in memory with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(2, 6, 2), nn.Conv2d(6, 5, 1), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(torch.relu(self.a(x.view(-1, 2, 2, 2)))).mean((2, 3)))


class Block(nn.Module):
    """66 elements; in a flat vector its five parameters begin at 0, 36, 44, 52 and 60."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.a(x)))
        return x + F.pad(self.b(y), (2, 2))


class Deep(nn.Module):
    """Three blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.first(x)))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def head(self, x: Tensor) -> Tensor:
        return self.last(x)


class Tied(Deep):
    """The head is the first layer: eight classes. The first block shares a matrix with the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()
        self.blocks[2].a.weight = self.blocks[0].a.weight

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first.weight.T)


class Frozen(Deep):
    """The first and the last block have a matrix that is not trained; no parameter of the middle block is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].a.weight.requires_grad_(False)
        self.blocks[2].b.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class OneEach(Deep):
    """Blocks of one parameter; 36 elements do not divide by 5, nor 8 x 6 + 6 by 4."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))


class Repeated(Deep):
    """The first block is called again after the second."""

    def middle(self, x: Tensor) -> Tensor:
        for place in (0, 1, 0, 2):
            x = self.blocks[place](x)
        return x


class Recomputing(Deep):
    """A model that checkpoints its blocks itself: they are called again in backward, to their ends."""

    def middle(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return x


class Stochastic(Deep):
    def head(self, x: Tensor) -> Tensor:
        return super().head(F.dropout(x, 0.3))


MODELS: dict[str, type[nn.Module]] = {
    "normed": Normed,
    "dropped": Dropped,
    "shared": Shared,
    "unused": Unused,
    "mixed": Mixed,
    "embedded": Embedded,
    "images": Images,
    "deep": Deep,
    "tied": Tied,
    "frozen": Frozen,
    "one each": OneEach,
    "repeated": Repeated,
    "recomputing": Recomputing,
    "stochastic": Stochastic,
}
SGD, ADAMW = "sgd:lr=0.1:momentum=0.9", "adamw:lr=0.01:weight_decay=0.1"


def layout_of(module: nn.Module) -> ModelLayout:
    if isinstance(module, Deep):
        return ModelLayout(blocks=("blocks.0", "blocks.1", "blocks.2"))
    return ModelLayout(blocks=("layers",) if isinstance(module, Normed) else ())


def build(model: str) -> nn.Module:
    seed_torch(0)
    return MODELS[model]()


def batch(step: int, micro: int, replica: int) -> tuple[Tensor, Tensor]:
    """In the third step each replica has less than the one before it."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + replica)
    samples = 6 - replica if step == 2 else 4
    return torch.randn(samples, 8, generator=generator), torch.randint(5, (samples,), generator=generator)


def seed(step: int, replica: int) -> None:
    seed_torch(1_000_000 + 10 * step + replica)


def copied(pairs: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in pairs}


def fingerprint(parameters: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for _, value in parameters:
        digest.update(value.detach().numpy().tobytes())
    return digest.hexdigest()


def train(rank: int, model: str, settings: dict[str, Any], steps: int = STEPS) -> list[dict[str, Any]]:
    """On a rank: each step's start, gradients, loss and end."""
    module = build(model)
    chosen = TrainSettings(**settings)
    trainer = Trainer(
        module,
        F.cross_entropy,
        device=CPU,
        settings=chosen,
        layout=layout_of(module),
        group=open_exchange(),
    )
    found = []
    books = trainer.model.gradient_exchange
    for step in range(steps):
        start = copied(trainer.model.named_parameters()) | copied(module.named_buffers())
        carried = copied(books.carried()) if books is not None else {}
        seed(step, rank)
        loss = trainer.compute_gradients(batch(step, micro, rank) for micro in range(chosen.accumulation))
        gradients = copied(trainer.model.named_gradients())
        trainer.update()
        found.append(
            {
                "start": start,
                "loss": loss.item(),
                "gradients": gradients,
                "carried": carried,
                "residual": copied(books.residual()) if books is not None else {},
                "parameters": copied(trainer.model.named_parameters()),
                "buffers": copied(module.named_buffers()),
                "fingerprint": fingerprint(trainer.model.named_parameters()),
            }
        )
    found[-1]["state"] = _flat(trainer.model.named_state(trainer.optimizer))
    return found


def _flat(states: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Tensor]:
    """The optimizer's state of each parameter, by its name and the state's."""
    return {
        f"{name}.{key}": torch.as_tensor(value).clone()
        for name, values in states
        for key, value in sorted(values.items())
    }


class Serial:
    """The same on one process: replicas one after another, their gradients averaged in rank order."""

    def __init__(self, model: str, replicas: int, settings: dict[str, Any]) -> None:
        self.module = build(model)
        if settings.get("memory_format") == "channels_last":
            self.module = self.module.to(memory_format=torch.channels_last)
        self.optimizer = _optimizer(settings.get("optimizer", SGD), self.module)
        self.replicas = replicas
        self.accumulation = settings.get("accumulation", 1)

    def gradients(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The averages, and for each element the mean of the replicas' absolute values."""
        total: dict[str, Tensor] = {}
        size: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
        self.buffers: list[dict[str, Tensor]] = []
        for replica in range(self.replicas):
            twin = self._replica(step, replica)
            for name, gradient in _dense_gradients(twin):
                share = gradient / self.replicas
                total[name] = total[name] + share if name in total else share
                size[name] = size[name] + share.abs()
            self.buffers.append(dict(twin.named_buffers()))
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
        self.module.load_state_dict({**self.module.state_dict(), **self.buffers[0]})

    def state(self) -> dict[str, Tensor]:
        states = self.optimizer.state
        return _flat((name, states[p]) for name, p in self.module.named_parameters() if p in states)


def _optimizer(text: str, module: nn.Module) -> torch.optim.Optimizer:
    if text == ADAMW:
        return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _dense_gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_as_serial(results: list[list[dict[str, Any]]], model: str, settings: dict[str, Any]) -> None:
    """One rank or two trained as the serial loop does, bit for bit.

    a + b = b + a, and halving is exact: with two replicas no order of the sum can differ.
    """
    serial = Serial(model, len(results), settings)
    for step in range(len(results[0])):
        gradients, _ = serial.gradients(step)
        for rank, result in enumerate(results):
            assert_same(result[step]["gradients"], gradients)
            assert_same(result[step]["buffers"], serial.buffers[rank])
        serial.update(gradients, settings.get("clip_norm"))
        for result in results:
            assert_same(result[step]["parameters"], dict(serial.module.named_parameters()))
        assert len({result[step]["loss"] for result in results}) == len(results)
    for result in results:
        assert_same(result[-1]["state"], serial.state())


def assert_near_serial(results: list[list[dict[str, Any]]], model: str, settings: dict[str, Any]) -> None:
    """Each step of any number of ranks is the serial loop's up to the rounding of the average.

    Either side rounds each share g_r / p, one of them with a factor 1 / p that is rounded itself, and adds
    p of them in its own order: p + 1 factors (1 + d). With gamma(n) = n u / (1 - n u) (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1) they differ by at most 2 gamma(p + 1) sum |g_r| / p; that
    one of them rounds less pays for the rounding of the sum.
    """
    size = len(results)
    bound = 2 * (size + 1) * UNIT_ROUNDOFF / (1 - (size + 1) * UNIT_ROUNDOFF)
    for step in range(len(results[0])):
        serial = Serial(model, size, settings)
        # Not strict: a shared matrix has one name.
        serial.module.load_state_dict(results[0][step]["start"], strict=False)
        gradients, sizes = serial.gradients(step)
        for rank, result in enumerate(results):
            assert result[step]["gradients"].keys() == gradients.keys()
            for name, gradient in result[step]["gradients"].items():
                assert bool(((gradient - gradients[name]).abs() <= bound * sizes[name]).all()), name
            assert_same(result[step]["buffers"], serial.buffers[rank])
        assert len({result[step]["fingerprint"] for result in results}) == 1


def assert_law_is_kept(results: list[list[dict[str, Any]]], model: str, settings: dict[str, Any]) -> int:
    """Gradients were applied or are in residuals: sum g_r / p + sum carried_r = applied + sum residual_r.

    Within 256 roundings of single precision of the L2 norm of all that is added up. Returns the number of
    steps with a residual.
    """
    lossy = 0
    for step in range(len(results[0])):
        serial = Serial(model, len(results), settings)
        serial.module.load_state_dict(results[0][step]["start"], strict=False)
        gradients, sizes = serial.gradients(step)
        for name, gradient in gradients.items():
            residuals = [result[step]["residual"].get(name, torch.zeros(())).double() for result in results]
            carried = [result[step]["carried"].get(name, torch.zeros(())).double() for result in results]
            applied = results[0][step]["gradients"][name].double()
            error = gradient + sum(carried) - applied - sum(residuals)
            size = sizes[name] + sum(part.abs() for part in (*residuals, *carried))
            assert error.norm() <= 256 * UNIT_ROUNDOFF * size.norm(), (step, name)
        lossy += any(bool(part.any()) for part in results[0][step]["residual"].values())
        assert len({result[step]["fingerprint"] for result in results}) == 1
    return lossy


class Counter:
    """Notes how many exchanges there have been whenever a phase begins."""

    def __init__(self, exchange: ExchangeGroup) -> None:
        self.exchange = exchange
        self.seen: list[tuple[str, int]] = []

    def begins(self, phase: Phase) -> None:
        self.seen.append((phase.value, self.exchange.traffic.operations))

    def step_done(self, loss: Tensor) -> None:
        self.seen.append(("done", self.exchange.traffic.operations))


def count_exchanges(rank: int, settings: dict[str, Any]) -> list[tuple[str, int]]:
    """On a rank: the third step of three micro-batches, exchanges counted from its start.

    In the first two, ranks agree on the order in which gradients become ready.
    """
    module, exchange = build("shared"), open_exchange()
    chosen = TrainSettings(accumulation=3, **settings)
    trainer = Trainer(module, F.cross_entropy, device=CPU, settings=chosen, group=exchange)
    for step in range(2):
        trainer.step(batch(step, micro, rank) for micro in range(3))
    exchange.reset()
    trainer.observer = counter = Counter(exchange)
    trainer.step(batch(2, micro, rank) for micro in range(3))
    return counter.seen


def integer_step(rank: int, strategy: str, exchange: dict[str, Any]) -> dict[str, Tensor]:
    """On a rank: one SGD step of y = W x with the loss size * sum(y t), whose gradient is size * t x."""
    size = torch.distributed.get_world_size()
    module = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return size * (outputs * targets).sum()

    settings = TrainSettings(strategy=strategy, optimizer="sgd:lr=0.5:momentum=0", **exchange)
    trainer = Trainer(module, loss, device=CPU, settings=settings, group=open_exchange())
    trainer.step(iter([(torch.tensor([[rank + 1.0, 7.0, 0.0]]), torch.tensor([[1.0, rank - 1.0]]))]))
    return copied(trainer.model.named_parameters())


INTEGER_WEIGHTS = [
    # The average is the sum of t x over the ranks, with t = (1, r - 1) and x = (r + 1, 7, 0); W - g / 2.
    # One rank: (1, 7, 0) and (-1 * 1, -7, 0).
    (1, [[1 - 0.5, 2 - 3.5, 3.0], [4 + 0.5, 5 + 3.5, 6.0]]),
    # Two ranks: (1 + 2, 7 + 7, 0) and (-1 * 1 + 0 * 2, -7 + 0, 0).
    (2, [[1 - 1.5, 2 - 7.0, 3.0], [4 + 0.5, 5 + 3.5, 6.0]]),
    # Three ranks: (1 + 2 + 3, 7 + 7 + 7, 0) and (-1 * 1 + 0 * 2 + 1 * 3, -7 + 0 + 7, 0).
    (3, [[1 - 3.0, 2 - 10.5, 3.0], [4 - 1.0, 5.0, 6.0]]),
    # Four ranks: (1 + 2 + 3 + 4, 4 * 7, 0) and (-1 + 0 + 3 + 2 * 4, -7 + 0 + 7 + 14, 0).
    (4, [[1 - 5.0, 2 - 14.0, 3.0], [4 - 5.0, 5 - 7.0, 6.0]]),
]
"""Weights by the number of ranks. k = 3 k * fl(1/3) exactly: fl(1/3) is off by 2^-25 of it, less than half of
k's last place."""
