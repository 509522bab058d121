"""One rank of `test_compressed_link`: exchanges of ResNet-50's gradients, dense and compressed, in turns.

    compressed_link.py RANK ADDRESS ROUNDS

Rank 0 prints one JSON line: by compression, the seconds of each exchange with the link (`on`) and without
(`off`: only encoding and decoding), and the bytes that it hands over.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from harness.worker.rank.rank import leave_after
from strategies import ExchangeSettings, GradientExchange
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.scratch_ddp.reducer import Bucketing, fill_buckets
from workloads.build import build_workload

COMPRESSIONS = ("none", "bf16", "topk:0.01", "topk:0.01:select=sampled", "powersgd:4", "int8")
BUCKETING = Bucketing(first_bytes=2**20, bytes=25 * 2**20, find_unused=False, as_parameters=False)
CPU = torch.device("cpu")


def buckets() -> list[Bucket]:
    """All gradients of ResNet-50, 25.6 million, in the order and the buckets of scratch-ddp."""
    with torch.device("meta"):
        named = list(build_workload("resnet50", source_folder=None).module.named_parameters())[::-1]
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for index, run in enumerate(fill_buckets([parameter for _, parameter in named], BUCKETING)):
        pieces = pieces_of((named[position][0], named[position][1].shape) for position in run)
        size = sum(piece.numel for piece in pieces)
        found.append(Bucket(index=index, values=torch.randn(size, generator=generator), pieces=pieces))
    return found


class Side:
    """One way to exchange gradients, with its values."""

    def __init__(self, compression: str, group: ExchangeGroup, start: list[Bucket]) -> None:
        self._exchange = GradientExchange(ExchangeSettings(group=group, compression=compression), device=CPU)
        self._start = start
        self._buckets = [
            Bucket(index=bucket.index, values=bucket.values.clone(), pieces=bucket.pieces) for bucket in start
        ]

    def exchange(self) -> float:
        """Seconds of one exchange of all buckets, to the last rank."""
        for bucket, start in zip(self._buckets, self._start, strict=True):
            bucket.values.copy_(start.values)
        dist.barrier()
        began = time.perf_counter()
        for pending in [self._exchange.start(bucket) for bucket in self._buckets]:
            pending.wait()
        wall = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        return wall.item()


@torch.no_grad()
def measure(rounds: int) -> dict[str, dict[str, object]]:
    group = open_exchange()
    start = buckets()
    sides = {compression: Side(compression, group, start) for compression in COMPRESSIONS}
    found: dict[str, dict[str, object]] = {}
    for compression, side in sides.items():
        before = group.traffic.payload_bytes
        side.exchange()
        found[compression] = {"bytes": group.traffic.payload_bytes - before, "on": [], "off": []}
    for _ in range(rounds):
        for enabled, key in ((True, "on"), (False, "off")):
            for compression, side in sides.items():
                group.traffic.enabled = enabled
                found[compression][key].append(side.exchange())
        group.traffic.enabled = True
    return found


def main() -> None:
    rank, address, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=2)
    found = measure(rounds)
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    leave_after(main)
