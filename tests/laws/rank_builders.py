"""Shared builders of the worker's tests: a launch, a context of a rank, a stopwatch, a small network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from harness.worker.exchange.group import open_exchange
from harness.worker.measure.blocks import Stopwatch
from harness.worker.measure.clock import StepClock
from harness.worker.rank.context import RankContext
from harness.worker.rank.control import Control
from harness.worker.rank.log import RankLog, Watchdog
from harness.worker.rank.rank import Rank
from results.environment import CodeVersion
from results.launch import Launch
from results.outcome import Evidence
from results.plan import Placement
from results.store import Study
from strategies import Trainer, TrainSettings
from strategies.devices import Host

Ranks = Callable[..., list[Any]]
"""The type of the fixture `ranks`."""
CPU = torch.device("cpu")
MS = 1_000_000
"""Nanoseconds."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, as a rank on CPU does: in a file, or below a conftest, that has this name."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Queues(Host):
    """The CPU, taken for a device whose calls return before their work is done."""

    asynchronous = True


def a_rank(rank: int = 0, size: int = 1) -> Rank:
    """A rank of a launch on one node."""
    return Rank(rank=rank, local_rank=rank, node_rank=0, gpus=size, local_gpus=size)


def a_launch(size: int = 1, **fields: Any) -> Launch:
    """A launch of `size` CPU ranks without slots, or what `fields` make of it."""
    base = {
        "launch_id": "l",
        "placement": Placement(nodes=1, gpus_per_node=size),
        "device": "cpu",
        "backend": "gloo",
        "evidence": Evidence.MEASURED,
        "slots": (),
        "code": CodeVersion(code_hash="h"),
    }
    return Launch(**base | fields)


@contextmanager
def a_context(rank: int, folder: Path | str, launch: dict[str, Any], **fields: Any) -> Iterator[RankContext]:
    """The context of this rank, or what `fields` make of it; its study is in `folder`."""
    size = dist.get_world_size()
    Path(folder).mkdir(parents=True, exist_ok=True)
    log = RankLog(Path(folder) / f"{rank}.jsonl", rank, Watchdog(900))
    try:
        yield RankContext(
            **{
                "study": Study(Path(folder)),
                "launch": a_launch(size, **launch),
                "evidence": Evidence.MEASURED,
                "rank": a_rank(rank, size),
                "device": CPU,
                "cores": (0,),
                "pinned": (),
                "exchange": fields.get("exchange") or open_exchange(),
                "control": Control(CPU),
                "log": log,
            }
            | fields
        )
    finally:
        log.close()


def a_trainer(
    module: nn.Module,
    loss: Any = functional.mse_loss,
    *,
    layout: Any = None,
    group: Any = None,
    **settings: Any,
) -> Trainer:
    """A trainer on CPU with these settings."""
    chosen = TrainSettings(**settings)
    return Trainer(module, loss, device=CPU, settings=chosen, layout=layout, group=group)


def a_stopwatch(trainer: Trainer, data: Iterator[Any], control: Any = None) -> Stopwatch:
    """A stopwatch of this rank with the host's clock and without a log."""
    log: Any = SimpleNamespace(heartbeat=lambda: None)
    return Stopwatch(trainer, data, clock=StepClock(CPU), control=control or Control(CPU), log=log)


class Moments:
    """Stands for the module `time`: the clock is read at these moments, in ns."""

    def __init__(self, *moments: int) -> None:
        self._moments = iter(moments)

    def perf_counter_ns(self) -> int:
        return next(self._moments)


def network(dropout: float | None = None) -> nn.Module:
    """Linear(8, 48), BatchNorm1d(48), Linear(48, 5): 432, 96 and 245 parameters, the same at each call."""
    torch.manual_seed(0)
    between = [nn.ReLU()] if dropout is None else [nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(nn.Linear(8, 48), nn.BatchNorm1d(48), *between, nn.Linear(48, 5))


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches for `network`, which differ between ranks."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(4, 8, generator=generator), torch.randint(5, (4,), generator=generator)
