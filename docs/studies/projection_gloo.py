"""The replay of `bench project` against real Gloo runs over shaped links: from 1 and 2 ranks to 4.

    python docs/studies/projection_gloo.py 1000 20 gloo.json     measures (Linux, root), and scores
    python docs/studies/projection_gloo.py gloo.json             scores again

Computation is a sleep, so that 4 ranks do not share the cores of a small machine; for the same reason more
ranks than cores are not refused here. The steps of all sizes are interleaved in one launch, so that a busy
moment affects all of them. The network is measured on 4 ranks as well; steps of 4 ranks are only compared.
Run it on a quiet machine: Gloo computes too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.features.project import laws
from harness.features.project.recorded import Stragglers
from harness.features.project.series import Replayed, scaled
from harness.launch.virtual_network import VirtualSwitch
from harness.machine.kernel import enter_network
from results.cell import Cell
from results.network import Measurement, NetworkFacts, NetworkTable
from results.outcome import Evidence
from results.parts import ModelParts, Part, Saved, Weight
from strategies.catalog import STRATEGIES, group_layout
from strategies.closed_form.replay import AT_ONCE, Operation, Work, operations_of, replay
from strategies.closed_form.terms import Collective, Piece, Term

RANKS, SIZES, BLOCKS = 4, (1, 2, 4), 8
PAYLOADS = tuple(16 * 2**10 * 4**power for power in range(6))
"""Bytes that a rank hands over when the network is measured: 16 KiB to 16 MiB."""
SEED, BATCH = 0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One configuration, which is measured on 1, 2 and 4 ranks."""

    name: str
    strategy: str
    width: int
    forward_s: float
    """Sleep of a block in forward; twice that in backward."""
    slow: float = 1.0
    """How many times as long the odd ranks sleep."""
    stall_s: float = 0.0
    """A sleep in addition, in one step of ten of each rank."""

    @property
    def parts(self) -> ModelParts:
        block = Part(
            weights=(Weight(rows=self.width, columns=self.width), Weight(rows=self.width)),
            saved=Saved(),
            flops=1,
        )
        head = Part(weights=(Weight(rows=1, columns=self.width), Weight(rows=1)), saved=Saved())
        return ModelParts(stem=Part(weights=(), saved=Saved()), blocks=(block,) * BLOCKS, head=head)


_RATIOS = {"balanced": (512, 0.010), "bound": (1024, 0.004), "hidden": (256, 0.015)}
APART = [
    Setting(name=name, strategy=strategy, width=width, forward_s=nap)
    for name, (width, nap) in _RATIOS.items()
    for strategy in ("ddp:bucket_mb=2", "fsdp")
]
SLOW = [
    replace(APART[0], name="slow rank", slow=1.25),
    replace(APART[0], name="stalls", stall_s=0.1),
]
LAUNCHES: dict[int, list[Setting]] = {
    1: [*APART, *SLOW],
    2: [replace(each, name="balanced, 2 ranks a node") for each in APART[:2]],
}
"""The settings of each launch, by the ranks of a node."""


class Nap(torch.autograd.Function):
    """Sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Block(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, values: Tensor) -> Tensor:
        # The nap is last, so that the first layer's gradient ends the backward pass, as in a real model.
        result: Tensor = Nap.apply(values + 0.1 * torch.tanh(self.linear(values)), self.seconds)
        return result


class Steps:
    """The steps of one setting on a group of `size` ranks, on one rank without an exchange.

    `fsdp` on one rank gathers and reduces with itself: its copies are a part of its computation.
    """

    def __init__(self, setting: Setting, rank: int, group: dist.ProcessGroup, size: int) -> None:
        torch.manual_seed(SEED)
        self.setting, self.size, self.group = setting, size, group
        naps = setting.forward_s * (setting.slow if rank % 2 else 1.0)
        blocks = [Block(setting.width, naps) for _ in range(BLOCKS)]
        model: nn.Module = nn.Sequential(*blocks, nn.Linear(setting.width, 1))
        self.ready: list[tuple[int, float]] = []
        self._random = np.random.default_rng(rank)
        if setting.strategy == "fsdp":
            mesh = DeviceMesh.from_group(group, "cpu")
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif size > 1:
            wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=2)
            wrapped.register_comm_hook(group, self._sum)
            model = wrapped
        self._model, self._optimizer = model, torch.optim.SGD(model.parameters(), lr=1e-6)

    def _sum(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Note when a bucket is ready, and sum it."""
        self.ready.append((bucket.buffer().nbytes, time.perf_counter()))
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    # torch compares the annotations themselves, not their text.
    _sum.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[Tensor]})

    def step(self) -> dict[str, Any]:
        """Take one step; the moments are seconds since it began."""
        self.ready.clear()
        values = torch.randn(BATCH, self.setting.width)
        if self.size > 1:
            dist.barrier(self.group)
        begin = time.perf_counter()
        if self._random.random() < 0.1 and self.setting.stall_s:
            time.sleep(self.setting.stall_s)
        self._optimizer.zero_grad()
        loss = self._model(values).square().mean()
        forward = time.perf_counter() - begin
        loss.backward()
        backward = time.perf_counter() - begin
        self._optimizer.step()
        buckets = [(size, at - begin) for size, at in self.ready]
        step = time.perf_counter() - begin
        return {"step": step, "forward": forward, "backward": backward, "buckets": buckets}


def measure(rounds: int, per_node: int, path: Path) -> None:
    """On a rank: measure all settings of a launch and the network, `rounds` times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {size: dist.new_group(list(range(size))) for size in SIZES[1:]}
    own = [dist.new_group([one]) for one in range(RANKS)][rank]
    # Each rank takes steps without exchange too: how ranks differ is measured by them.
    alone = [Steps(setting, rank, own, 1) for setting in LAUNCHES[per_node]]
    together = [
        Steps(setting, rank, groups[size], size)
        for setting in LAUNCHES[per_node]
        for size in SIZES[1:]
        if rank < size
    ]
    found: dict[str, list[Any]] = {}
    for number in range(rounds + 1):
        dist.barrier()
        for steps in [*alone, *together][:: 1 if number % 2 else -1]:
            for _ in range(2):
                taken = steps.step()
                if number:
                    found.setdefault(
                        f"{steps.setting.name}|{steps.setting.strategy}|{steps.size}", []
                    ).append(taken)
        for size, group in groups.items():
            for collective, payload in _to_measure(size) if rank < size else ():
                seconds = _seconds(collective, payload, size, group)
                if number:
                    found.setdefault(f"network|{collective}|{size}|{payload}", []).append(seconds)
        if rank == 0:
            print(f"round {number} of {rounds}", flush=True)
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, found)
    if rank == 0:
        path.write_text(json.dumps(everyone), encoding="utf-8")
    dist.destroy_process_group()


def _to_measure(size: int) -> Iterator[tuple[Collective, int]]:
    for payload in PAYLOADS:
        yield "all-reduce", payload
        if payload * size <= PAYLOADS[-1]:
            yield "all-gather", payload


def _seconds(collective: Collective, payload: int, size: int, group: dist.ProcessGroup) -> float:
    values, whole = torch.zeros(payload // 4), torch.zeros(size * payload // 4)
    dist.barrier(group)
    begin = time.perf_counter()
    if collective == "all-reduce":
        dist.all_reduce(values, group=group)
    else:
        dist.all_gather_into_tensor(whole, values, group=group)
    return time.perf_counter() - begin


def launch(mbit: float, rounds: int, per_node: int) -> list[dict[str, list[Any]]]:
    """Start 4 ranks on virtual nodes, and return what each of them measured."""
    nodes = VirtualSwitch().connect(RANKS // per_node, mbit)
    path = Path(f"gloo-{os.getpid()}.part")
    base = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29511"}
    base |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "rank", str(rounds), str(per_node), str(path)]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | base | {"RANK": str(rank)},
            pass_fds=[nodes[rank // per_node].network],
            preexec_fn=partial(enter_network, nodes[rank // per_node].network),
        )
        for rank in range(RANKS)
    ]
    if max(rank.wait() for rank in ranks):
        sys.exit("a rank failed")
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


class Launch:
    """Predicts steps of 4 ranks from what the ranks of one launch measured."""

    def __init__(self, ranks: list[dict[str, list[Any]]], per_node: int) -> None:
        self.ranks, self.per_node = ranks, per_node
        rows = []
        for key in ranks[0]:
            if key.startswith("network|"):
                _, collective, size, payload = key.split("|")
                seconds = [
                    max(each) for each in zip(*(rank[key] for rank in ranks if key in rank), strict=True)
                ]
                group: Any = (collective, int(payload), int(size), self.nodes(int(size)))
                ends = min(seconds), max(seconds)
                rows.append(Measurement.of(group, median(seconds), *ends, len(seconds)))
        self.table = NetworkTable(
            source="bench",
            measured_at="2026-01-01T00:00:00Z",
            facts=NetworkFacts(backend="gloo"),
            evidence=Evidence.EMULATED,
            measurements=tuple(rows),
        )

    def nodes(self, size: int) -> int:
        return max(1, size // self.per_node)

    def seconds(self, operation: Operation) -> float:
        return self.table.seconds(
            operation.collective, operation.payload_bytes, operation.ranks, operation.nodes
        )

    def of(self, setting: Setting, size: int) -> list[list[dict[str, Any]]]:
        key = f"{setting.name}|{setting.strategy}|{size}"
        return [rank[key] for rank in self.ranks if key in rank]

    def step_s(self, setting: Setting, size: int) -> float:
        """The median step of the slowest rank; with stragglers the mean, which rare steps are a part of."""
        taken = self.of(setting, size)[: max(1, size)]
        slowest = [max(step["step"] for step in steps) for steps in zip(*taken, strict=True)]
        return (fmean if setting in SLOW else median)(slowest)

    def predicted_s(self, setting: Setting, size: int) -> float:
        """The replay of a step, from 1 rank's computation and the buckets of 2; without a scale."""
        alone = [rank for rank in self.of(setting, 1)[:2]]
        steps = [step for rank in (alone if setting in SLOW else alone[:1]) for step in rank]
        middle = fmean if setting in SLOW else median
        forward, backward, whole = (
            middle(step[part] for step in steps) for part in ("forward", "backward", "step")
        )
        work = Work(forward_s=forward, backward_s=backward - forward, update_s=whole - backward)
        delays: tuple[float, ...] = ()
        if setting in SLOW:
            columns = np.array([[step["step"] for step in rank] for rank in alone])
            delays = Stragglers.of([(columns, [0, 1])]).delays_s(size, size)
        cell = Cell(
            workload="naps", dataset="synthetic", strategy=STRATEGIES.parse(setting.strategy).text, gpus=size,
            micro_batch=BATCH, device="cpu", backend="gloo", optimizer="sgd",
        )  # fmt: skip
        terms = [
            self._recorded(term, setting)
            for term in STRATEGIES.facts(cell.strategy).terms(cell, setting.parts)
        ]
        operations = operations_of(terms, work, group_layout(cell.strategy, size), self.per_node)
        return replay(work, operations, self.seconds, at_once=AT_ONCE["gloo"], delays_s=delays).step_s

    def _recorded(self, term: Term, setting: Setting) -> Term:
        """Replace the buckets of the closed form by the ones that 2 ranks recorded."""
        if setting.strategy == "fsdp":
            return term
        steps = [step for rank in self.of(setting, 2) for step in rank]
        sizes = [size for size, _ in steps[-1]["buckets"]]
        shares = []
        for step in steps:
            moments = [at for _, at in step["buckets"]]
            if len(moments) == len(sizes):
                length = moments[-1] - step["forward"]
                shares.append([1 - (moments[-1] - at) / length for at in moments])
        pieces = tuple(map(Piece, sizes, map(median, zip(*shares, strict=True))))
        return replace(term, pieces=pieces, operations=len(pieces), payload_bytes=sum(sizes))


def score(launches: dict[int, Launch]) -> None:
    """Print each cell with its errors, and whether the rule of `bench project` lets the replay answer."""
    print("| setting | 1 rank | 2 | 4 | replay of 2 | replay | constant | ring | log | the replay answers |")
    print("|" + "---|" * 10)
    errors: dict[str, list[float]] = {}
    communicates = beats = 0
    for per_node, settings in LAUNCHES.items():
        for setting in settings:
            own = launches[per_node]
            one, two, four = (own.step_s(setting, size) for size in SIZES)
            fitted = own.predicted_s(setting, 2)
            steps = laws.Steps(gpus=SIZES[:2], ns=(one, two), pool_slope=0.0)
            replays = {size: Replayed(step_ns=own.predicted_s(setting, size), loss="") for size in SIZES[:2]}
            scale = scaled(steps, replays)
            rows = {"replay": (1.0 if isinstance(scale, str) else scale[0]) * own.predicted_s(setting, 4)}
            rows |= {"constant": two, "ring": one + 1.5 * (two - one), "log": one + log2(4) * (two - one)}
            found = {name: predicted / four - 1 for name, predicted in rows.items()}
            for name, error in found.items():
                kind = name if isinstance(scale, str) else f"{name}, where the replay answers"
                errors.setdefault(kind, []).append(abs(error))
            if four > 1.1 * one and not isinstance(scale, str):
                communicates += 1
                beats += abs(found["replay"]) < min(abs(found["constant"]), abs(found["ring"]))
            cells = [f"{1e3 * seconds:.0f} ms" for seconds in (one, two, four)]
            cells += [f"{fitted / two - 1:+.1%}", *(f"{error:+.1%}" for error in found.values())]
            cells.append(f"no: {scale}" if isinstance(scale, str) else "yes")
            print(f"| {setting.name}, {setting.strategy} | " + " | ".join(cells) + " |")
    for name, values in errors.items():
        within = sum(value <= 0.10 for value in values) / len(values)
        print(f"{name}: median {median(values):.1%}, largest {max(values):.1%}, within 10 %: {within:.0%}")
    print(
        f"better than constant and ring in {beats} of {communicates} answered cells with more than 10 % "
        "communication"
    )


def main() -> None:
    if sys.argv[1] == "rank":
        measure(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        return
    path = Path(sys.argv[-1])
    if len(sys.argv) == 4:
        mbit, rounds = float(sys.argv[1]), int(sys.argv[2])
        # A switch takes the process into a network of its own: one process a launch.
        measured = {}
        for per_node in LAUNCHES:
            command = [sys.executable, __file__, "launch", str(mbit), str(rounds), str(per_node), str(path)]
            subprocess.run(command, check=True)
            measured[per_node] = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(measured), encoding="utf-8")
    if sys.argv[1] == "launch":
        found = launch(float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        path.write_text(json.dumps(found), encoding="utf-8")
        return
    kept = json.loads(path.read_text(encoding="utf-8"))
    score({int(per_node): Launch(ranks, int(per_node)) for per_node, ranks in kept.items()})


if __name__ == "__main__":
    main()
