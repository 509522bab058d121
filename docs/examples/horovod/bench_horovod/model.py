"""Horovod's optimizer as a strategy (Sergeev and Del Balso 2018, arXiv:1802.05799).

The hooks of Horovod's `DistributedOptimizer` average each gradient during the last backward pass of a step.
Its background thread fuses the gradients that are ready, and exchanges them over separate connections. The
optimizer that Horovod was given takes the step, as in Horovod's own `step`. As in all strategies of bench,
the loss is divided by the micro-batches, and the buffers of rank 0 are sent at the start of a step.

torchrun starts the ranks, so this module does the work of `horovodrun`: rank 0 serves the addresses of the
ranks, and environment variables have the place of each rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from bench_horovod.facts import Horovod
from results.errors import UsageError
from strategies.advice import WHOLE
from strategies.collectives.link import Link
from strategies.training.layouts import require_dense
from strategies.training.parallel import OwnTransport, ParallelModel, Setting
from strategies.training.replicas import Buffers, take_from_first


class HorovodModel(ParallelModel):
    """A module whose replicas start alike, and whose gradients Horovod averages."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the parameters and buffers of rank 0, and Horovod connects them.

        Raises UsageError if Horovod cannot be used here, and for gradients that it does not average: sparse
        ones, and those in bfloat16.
        """
        super().__init__(module)
        require_dense(module, "horovod", WHOLE)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if any(parameter.dtype == torch.bfloat16 for parameter in trained):
            raise UsageError(f"horovod averages no gradients in bfloat16: use --precision bf16, or {WHOLE}")
        self._facts = facts = cast(Horovod, setting.facts)
        self._link, self._buffers = Link(setting.exchange.group), Buffers(module)
        for tensor in (*module.parameters(), *self._buffers.now()):
            take_from_first(self._link, [tensor])
        self._horovod = _connected(self._link, facts, setting.device)
        payload, operations = facts.sent(sum(parameter.numel() for parameter in trained))
        self.own_transport = OwnTransport(
            what="Horovod exchanges over separate connections, which bench does not see",
            payload_bytes=payload,
            operations=operations,
        )
        self._averaging: Any = None

    def build_optimizer(self, text: str) -> torch.optim.Optimizer:
        inner = super().build_optimizer(text)
        compression = self._horovod.Compression
        self._averaging = self._horovod.DistributedOptimizer(
            inner,
            named_parameters=self.bare.named_parameters(),
            compression=compression.fp16 if self._facts.averages_half else compression.none,
            backward_passes_per_step=self.settings.accumulation if self.settings else 1,
            op=self._horovod.Average,
        )
        return inner

    def started(self) -> None:
        take_from_first(self._link, self._buffers.now())

    def exchange(self, *, now: bool) -> AbstractContextManager[None]:
        return self._exchanging() if now else nullcontext()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        yield
        self._averaging.synchronize()


def _connected(link: Link, facts: Horovod, device: torch.device) -> Any:
    """Import Horovod, and connect the ranks of a link for as long as this process lives; collective.

    Raises UsageError if Horovod cannot be used here.
    """
    horovod = facts.engine.load(device.type)
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    if not horovod.gloo_built() or (device.type == "cuda" and not horovod.nccl_built()):
        lacks = "NCCL (HOROVOD_GPU_OPERATIONS=NCCL)" if horovod.gloo_built() else "Gloo"
        raise UsageError(f"{facts.engine.code} was built without {lacks}: build it anew (docs/engines.md)")
    settings = {
        "HOROVOD_SIZE": str(link.size),
        "HOROVOD_FUSION_THRESHOLD": str(facts.fusion_bytes),
        "HOROVOD_CYCLE_TIME": str(facts.spec.number("cycle_ms")),
    }
    if horovod.is_initialized():
        # It cannot be connected a second time, and has read its settings.
        if settings != {name: os.environ[name] for name in settings}:
            raise UsageError(
                f"Horovod runs in this process with other settings: start {facts.spec.text} anew"
            )
        return horovod
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", link.size))
    hosts, (host, local_rank) = link.size // local_size, divmod(link.rank, local_size)
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = torch.zeros(1, dtype=torch.int32, device=device)
    if link.rank == 0:
        server = RendezvousServer(verbose=0)
        port.fill_(server.start())
        names = ",".join(f"host-{index}:{local_size}" for index in range(hosts))
        server.init(get_host_assignments(parse_hosts(names), link.size))
    take_from_first(link, [port])
    places: dict[str, object] = {
        "RANK": link.rank,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": host,
        "CROSS_SIZE": hosts,
        "HOSTNAME": f"host-{host}",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_RENDEZVOUS_PORT": int(port),
        "GLOO_IFACE": "lo" if address == "127.0.0.1" else os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }
    os.environ.update(settings | {f"HOROVOD_{name}": str(value) for name, value in places.items()})
    horovod.init()
    return horovod
