"""The facts of this rank's process and machine: an allow-list, never the environment as a whole."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping

import psutil
import torch
from torch.nn.attention import _cur_sdpa_kernel_backends

from harness.machine.code import with_packages
from harness.machine.device import cpu_model, driver_version, nccl_settings, other_settings
from harness.worker.rank.rank import Rank
from harness.worker.rank.usage import started_by
from results.cell import Cell
from results.environment import Environment
from results.launch import JobVariables, Launch

SETTINGS = other_settings()
"""The settings that this process was given. Libraries of a workload may set others."""


def probe(
    launch: Launch,
    rank: Rank,
    device: torch.device,
    cores: tuple[int, ...],
    cell: Cell,
    transports: Iterable[str] = (),
) -> Environment:
    """What this rank runs on; `cores` are those it is bound to, empty for none; `transports` what NCCL moves
    data by."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return Environment(
        host=platform.node(),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        device_name=properties.name if properties else cpu_model(),
        device_memory_bytes=properties.total_memory if properties else psutil.virtual_memory().total,
        allocation=allocation(launch.job_variables),
        device_uuid=device_uuid(device) if cuda else None,
        cpu_model=cpu_model(),
        cores=len(os.sched_getaffinity(started_by().pid)),
        threads=torch.get_num_threads(),
        code=with_packages(launch.code, [cell]),
        driver=driver_version() if cuda else None,
        cuda=torch.version.cuda if cuda else None,
        nccl=nccl_version() if launch.backend == "nccl" else None,
        nodes=launch.placement.nodes,
        gpus_per_node=launch.placement.gpus_per_node,
        pinned_cores=cores,
        nccl_settings=nccl_settings(),
        settings=SETTINGS,
        transports=tuple(transports),
        attention=tuple(attention_kernels()),
    )


def attention_kernels() -> list[str]:
    """Those of torch's `scaled_dot_product_attention` that are switched on, the preferred one first.

    Of these torch takes for each call the first that can do it: by device, data type, head size and mask.
    """
    kernels = _cur_sdpa_kernel_backends(with_priority=True)
    return [kernel.name.removesuffix("_ATTENTION").lower() for kernel in kernels]


def allocation(names: Iterable[JobVariables], variables: Mapping[str, str] = os.environ) -> str | None:
    """The scheduler's job that this process runs in, such as `slurm 17, restart 2`; None for none."""
    for told in names:
        if (job := variables.get(told.job)) is not None:
            # A job that was put back into the queue keeps its number and gets other nodes.
            restart = variables.get(told.restarts, "0")
            return f"{told.scheduler} {job}" + (f", restart {restart}" if restart != "0" else "")
    return None


def device_uuid(device: torch.device) -> str:
    """The name that NVML has for a CUDA device.

    Of a part of a GPU CUDA gives the part's own UUID (cuDeviceGetUuid_v2), and a name such as `NVIDIA
    A100-SXM4-40GB MIG 1g.5gb`.
    """
    found = torch.cuda.get_device_properties(device)
    return f"{'MIG' if ' MIG ' in found.name else 'GPU'}-{found.uuid}"


def nccl_version() -> str:
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
