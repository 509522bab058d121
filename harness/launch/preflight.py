"""Checks of this machine before a launch: what prevents it, and what would spoil its figures."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

from harness.launch.command import code_environment
from harness.machine.code import checkout
from harness.machine.device import (
    ONLY_NVIDIA,
    amd_gpus,
    gpu_warnings,
    lost_gpus,
    on_battery,
    slow_governor,
    visible_gpus,
)
from harness.machine.torch_devices import ask_torch, torch_version
from reports.text import count
from results.cell import Device
from results.errors import MachineError

LEAST_FREE_BYTES = 200 * 2**20
BUSY_LOAD = 0.5
"""Load average per core above which the machine is called busy."""
TORCH = "torch>=2.11,<2.16"
"""The requirement of `pyproject.toml`; docs/testing.md lists the versions that were tried."""
LINK_TRIAL = ("-m", "harness.launch.virtual_network", "1000")
"""Arguments of a Python process that makes two trial nodes; its last line on stderr says what is missing."""


def require_torch() -> None:
    """Raises MachineError if torch is not installed; planning and reporting work without it."""
    if importlib.util.find_spec("torch") is None:
        raise MachineError(
            "torch is not installed: planning and reporting work without it, running does not; "
            f"install it with: pip install '{TORCH}'"
        )


def amd_only() -> str | None:
    """Say which GPUs of AMD, or which torch for them, this machine has; None if NVML shows a GPU."""
    if visible_gpus():
        return None
    shown, built = amd_gpus(), torch_version() or ""
    if shown:
        return f"this machine has {count(shown, 'AMD GPU')}; {ONLY_NVIDIA}"
    return f"torch {built} is built for AMD GPUs; {ONLY_NVIDIA}" if "+rocm" in built else None


def require_nvidia(device: Device) -> None:
    """Raises MachineError if ranks on GPUs are asked for and this machine has only AMD GPUs.

    Torch for ROCm calls its devices cuda, so that ranks would start and fail at the first question to NVML.
    """
    found = amd_only() if device == "cuda" else None
    if found is not None:
        raise MachineError(f"{found}: train on CPU with --device cpu")


def require_devices(device: Device) -> None:
    """Raises MachineError if torch cannot use the GPUs that NVML shows, or if only AMD's are there.

    Torch is asked about its GPUs only on a machine that has some.
    """
    require_nvidia(device)
    shown = len(visible_gpus()) if device == "cuda" else 0
    if not shown:
        return
    found, cpu = ask_torch(), "or train on CPU with --device cpu"
    if found.cuda is None and not found.error:
        raise MachineError(
            f"torch {found.torch} is built without CUDA, and this machine has {count(shown, 'GPU')}: install "
            f"a build with CUDA (https://pytorch.org/get-started/locally), {cpu}"
        )
    if found.error:
        raise MachineError(
            f"torch {found.torch} cannot use the {count(shown, 'GPU')} of this machine: {found.error}; "
            f"install a driver and a torch that go together, name the devices that work in "
            f"CUDA_VISIBLE_DEVICES, {cpu}"
        )
    if found.devices != shown:
        raise MachineError(
            f"torch {found.torch} sees {count(found.devices, 'GPU')}, and NVML {shown}: name those that may "
            f"be used in CUDA_VISIBLE_DEVICES (of parts of a GPU made by MIG, CUDA uses one), {cpu}"
        )


def require_tensorboard() -> None:
    """Raises MachineError if tensorboard is not installed; torch writes its files with it."""
    if importlib.util.find_spec("tensorboard") is None:
        raise MachineError(
            "--tensorboard needs a package that is not installed: install it with: pip install tensorboard; "
            "or leave the option out"
        )


def require_room(root: Path) -> None:
    """Raises MachineError if the disk of the study is nearly full."""
    folder = next(path for path in (root, *root.resolve().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        raise MachineError(
            f"{root} has {free / 2**20:.0f} MiB free, and a study needs {LEAST_FREE_BYTES / 2**20:.0f}: "
            f"free some space or choose another disk with --out; what is there is kept"
        )


@cache
def link_obstacle() -> str | None:
    """Why nodes with a network link can't be made here, and what to install; None if they can.

    A process makes two and takes them away again, within a second.
    """
    try:
        done = subprocess.run(
            [sys.executable, *LINK_TRIAL],
            env=code_environment(checkout()),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return "two virtual nodes could not be made in a minute"
    words = done.stderr.strip() or f"making two virtual nodes ended with {done.returncode}"
    return None if done.returncode == 0 else words.splitlines()[-1]


def unknown_name() -> list[str]:
    """Return a warning if this host's own name does not resolve, else nothing."""
    name = platform.node()
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        return [
            f"the name of this host, {name}, does not resolve ({error}): launches on this host alone do not "
            f"need it, but launches of several hosts that meet at this name cannot start; add a line with "
            f"the host's address and {name} to /etc/hosts, or register the name in DNS"
        ]
    return []


def warnings(device: Device) -> tuple[str, ...]:
    """Conditions of this machine at the start that may distort the figures; kept on every record."""
    if device == "cuda":
        lost = [
            f"GPU {gpu.index} is left out, as this process may not open it ({gpu.why}): ask the scheduler "
            f"for it, leave it out of CUDA_VISIBLE_DEVICES, or have /dev/nvidia{gpu.index} opened to this "
            f"user"
            if gpu.denied
            else f"GPU {gpu.index} does not answer and is left out: {gpu.why}"
            for gpu in lost_gpus()
        ]
        blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        waits = "CUDA_LAUNCH_BLOCKING is set: each kernel is waited for, and nothing overlaps; unset it"
        return (*gpu_warnings(visible_gpus()), *lost, *([waits] * blocking))
    found = []
    if on_battery():
        found.append("the machine runs on battery: its clocks may be held down")
    governor = slow_governor()
    if governor is not None:
        found.append(f"the CPU frequency governor is {governor}: clocks may be held down")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY_LOAD * cores:
        found.append(f"the machine was busy at the start: load {load:.1f} on {cores} cores")
    return tuple(found)
