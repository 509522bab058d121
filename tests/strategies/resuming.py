"""Runs that stop and resume: models, their training with all that a checkpoint holds, and comparisons."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tied import Tied, tied_layout, token_loss
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import Trainer, TrainSettings

CPU = torch.device("cpu")
REPLICAS = ("ddp", "scratch-ddp", "local-sgd", "single", "zero1")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(Tied):
    """A model that can be cut and split: no dropout, a matrix in two places, a parameter that is not
    trained."""

    def __init__(self) -> None:
        super().__init__(Block, 4)
        self.blocks[0].norm.bias.requires_grad_(False)


class Replica(nn.Module):
    """A model for replicas: convolutions, statistics, dropout, a number that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(32, 11)
        self.convolution, self.norm, self.dropout = nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.convolution(F.one_hot(x, 8).float().view(len(x), 2, 4, 4)))
        y = self.last(self.dropout(torch.tanh(y)).flatten(1)) * self.scale
        return y


LAYOUT = tied_layout(4, length=4)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() == 2:
        return F.cross_entropy(outputs, targets[:, 0])
    return token_loss(outputs, targets)


class Stream:
    """Batches by number: the position in the data that a run resumes from. Each draws from all generators."""

    def __init__(self, rank: int) -> None:
        self.rank, self.place = rank, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.place + self.rank)
        self.place += 1
        noise = int(random.random() * 2) + int(np.random.rand() * 2)
        x = torch.randint(8, (4, 4), generator=generator)
        return x, (x + noise).roll(1, 1)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def schedule_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """A schedule by the name of its class, with the numbers that the class needs."""
    schedules = torch.optim.lr_scheduler
    made: dict[str, Any] = {
        "LambdaLR": lambda: schedules.LambdaLR(optimizer, lambda step: 0.9**step),
        "StepLR": lambda: schedules.StepLR(optimizer, 2, 0.5),
        "MultiStepLR": lambda: schedules.MultiStepLR(optimizer, [2, 4], 0.5),
        "ConstantLR": lambda: schedules.ConstantLR(optimizer, total_iters=3),
        "LinearLR": lambda: schedules.LinearLR(optimizer, total_iters=5),
        "ExponentialLR": lambda: schedules.ExponentialLR(optimizer, 0.9),
        "PolynomialLR": lambda: schedules.PolynomialLR(optimizer, 6),
        "CosineAnnealingLR": lambda: schedules.CosineAnnealingLR(optimizer, 6),
        "CosineAnnealingWarmRestarts": lambda: schedules.CosineAnnealingWarmRestarts(optimizer, 3),
        "CyclicLR": lambda: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
        "OneCycleLR": lambda: schedules.OneCycleLR(optimizer, 0.1, total_steps=12),
        "SequentialLR": lambda: schedules.SequentialLR(
            optimizer,
            [schedules.LinearLR(optimizer, total_iters=3), schedules.CosineAnnealingLR(optimizer, 6)],
            [3],
        ),
        "ChainedScheduler": lambda: schedules.ChainedScheduler(
            [schedules.LinearLR(optimizer, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)]
        ),
    }
    return made[name]()


def opened(strategy: str, *, seed: int = 0, schedule: str = "OneCycleLR", **settings: Any) -> Trainer:
    """A trainer on this rank, with a schedule and its position in the data attached."""
    alike = strategy.startswith(("tp", "pipeline", "fsdp:tp"))
    rank = dist.get_rank() if dist.is_initialized() and not alike else 0
    torch.manual_seed(seed)
    # torch's own PowerSGD takes no parameter without a dimension.
    replicas = strategy.partition(":")[0] in REPLICAS and settings.get("compression") != "torch-powersgd:1"
    module = Replica() if replicas else Blocks()
    chosen = TrainSettings(strategy=strategy, **{"optimizer": "sgd:lr=0.05", **settings})
    trainer = Trainer(module, loss, device=CPU, settings=chosen, layout=None if replicas else LAYOUT)
    # In one order: torch warns of a schedule that steps before its optimizer.
    trainer.attach(schedule=schedule_of(schedule, trainer.optimizer), data=Stream(rank))
    torch.manual_seed(seed + 10 + rank)
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    return trainer


def train(trainer: Trainer, steps: int) -> list[float]:
    """The loss of each step."""
    losses = []
    for _ in range(steps):
        losses.append(trainer.step(iter(trainer.attached["data"])).item())
        with warnings.catch_warnings():
            # Where the first step overflows torch takes the schedule to be ahead of the optimizer.
            warnings.simplefilter("ignore")
            trainer.attached["schedule"].step()
    return losses


def seen(trainer: Trainer) -> dict[str, Any]:
    """All that two runs are compared by, of this rank."""
    found: dict[str, Any] = {"steps": trainer.steps, "scale": trainer.scaler.get_scale()}
    for owned in trainer.model.owned():
        state = trainer.model.local_state(trainer.optimizer).get(owned.parameter, {})
        for box, view in owned.boxes:
            found[box.text] = view(owned.parameter.detach()).clone()
            for key, value in state.items():
                alike = isinstance(value, Tensor) and value.shape == owned.parameter.shape and key != "step"
                found[f"{key} of {box.text}"] = (
                    view(value).clone() if alike else torch.as_tensor(value).clone()
                )
    found |= {f"buffer {name}": value.clone() for name, value in trainer.model.bare.named_buffers()}
    found |= {f"rate {place}": group["lr"] for place, group in enumerate(trainer.optimizer.param_groups)}
    found["drawn"] = [torch.rand(1).item(), random.random(), np.random.rand()]
    return found


def unlike(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The names of values that are not the same, bit for bit."""
    return [
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours
        or name not in theirs
        or (
            not torch.equal(ours[name], theirs[name])
            if isinstance(ours[name], Tensor)
            else ours[name] != theirs[name]
        )
    ]


def broken(rank: int, cases: list[tuple[str, dict[str, Any]]], folder: Path) -> list[str]:
    """On a rank: the cases in which a run that was resumed, or loaded, continues differently."""
    found = []
    for number, (strategy, settings) in enumerate(cases):
        run = folder / f"{number}"
        first = opened(strategy, **settings)
        train(first, 3)
        state = first.state_dict()
        assert first.save(run, asynchronous=number % 2 == 1).wait() is not None
        expected = train(first, 3), seen(first)
        resumed = opened(strategy, seed=1, **settings)
        came = resumed.resume(run)
        assert came.exact
        assert came.step == 3
        loaded = opened(strategy, seed=2, **settings)
        loaded.load_state_dict(state)
        for how, trainer in (("loaded", loaded), ("resumed", resumed)):
            if how == "resumed":
                # The random state is of the process: it goes back to where the checkpoint has it.
                trainer.resume(run)
            losses = train(trainer, 3)
            different = unlike(seen(trainer), expected[1])
            if losses != expected[0] or different:
                found.append(
                    f"{strategy} {settings} {how}: losses {losses} for {expected[0]}, {different[:3]}"
                )
    return found


def run_to_end(rank: int, case: tuple[str, dict[str, Any]], folder: Path, steps: int) -> str:
    """On a rank: a run that saves after every step, and resumes if it was begun; a digest of its end."""
    strategy, settings = case
    trainer = opened(strategy, **settings)
    trainer.resume(folder)
    saving = None
    while trainer.steps < steps:
        train(trainer, 1)
        saving = trainer.save(folder, keep=2, asynchronous=trainer.steps % 2 == 0)
    if saving is not None:
        assert saving.wait() is not None
    digest = hashlib.sha256()
    for name, value in sorted(seen(trainer).items()):
        digest.update(name.encode())
        digest.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return digest.hexdigest()
