"""FLOPs of a workload, counted by torch on the meta device (no memory, no arithmetic) or on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from results.cell import SYNTHETIC
from results.errors import BenchError
from workloads.batch import tensors
from workloads.build import build_workload
from workloads.data import POOL, DataRequest, open_batches
from workloads.datasets.facts import Own
from workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedFlops:
    """FLOPs of one micro-batch; 1 multiply-add = 2 FLOP."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_parts(
    text: str,
    *,
    micro_batch: int,
    source_folder: Path | None = None,
    own: bool = False,
    device: Literal["meta", "cpu"] = "meta",
) -> CountedFlops:
    """Count FLOPs of convolutions and matrix products, uncompiled and without recomputation, attention in
    full.

    `own` counts batches of the workload's own data, where it has synthetic samples as well. Raises BenchError
    if the model cannot run on the device: on meta not one that reads values of its tensors, as a user's may.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            with torch.device(device):
                workload = build_workload(text, source_folder=source_folder)
            return counted(workload, micro_batch, own=own, device=device)
    except BenchError:
        raise
    except Exception as error:  # a user's model may fail on meta tensors in any way
        raise BenchError(f"the FLOPs of {text} cannot be counted on the {device} device: {error}") from error


def counted(workload: Workload, micro_batch: int, *, own: bool = False, device: str = "meta") -> CountedFlops:
    """Count the FLOPs of a workload that was built in a context of the device.

    Raises BenchError if its batches differ in shape.
    """
    own = own or workload.synthetic is None
    # Drawn outside the meta context: a generator lives on the CPU.
    request = DataRequest(
        workload=workload,
        dataset=Own.name if own else SYNTHETIC,
        micro_batch=micro_batch,
        replica=0,
        replicas=1,
        seed=0,
        device=torch.device(device),
    )
    batch, *others = islice(open_batches(request), POOL if own or workload.input is None else 1)
    shapes = [tensor.shape for tensor in tensors(batch)]
    if any([tensor.shape for tensor in tensors(other)] != shapes for other in others):
        raise BenchError("its batches differ in shape")
    module = workload.module.to(device)
    # Named, so that the count never depends on which kernel torch prefers: a fused kernel's backward computes
    # the scores again, which would be counted, and the CPU's fused kernel is not counted at all.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = workload.loss_of(module, batch)
        forward = counter.get_total_flops()
        torch.autograd.backward(loss)
    return CountedFlops(forward=forward, backward=counter.get_total_flops() - forward)
