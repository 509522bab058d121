"""What NVML and the kernel tell of this machine's devices and cores, without torch. The home of pynvml."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pynvml

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device that this process may use, as NVML sees it; None is what NVML would not tell."""

    index: int
    """NVML's index, not that of `CUDA_VISIBLE_DEVICES`."""
    name: str
    uuid: str
    memory_bytes: int
    used_bytes: int
    processes: int | None
    """Compute processes on it."""
    throttled: bool | None
    ecc_errors: int | None
    """Uncorrected, since the driver was loaded."""
    near_cores: tuple[int, ...]
    """Cores of its NUMA node; empty if unknown."""


@contextmanager
def _nvml() -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> list[Gpu]:
    """The NVIDIA devices that `CUDA_VISIBLE_DEVICES` leaves, in its order; none where there is no driver."""
    with _nvml() as ready:
        if not ready:
            return []
        gpus = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return _selected(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def driver_version() -> str | None:
    with _nvml() as ready:
        return str(pynvml.nvmlSystemGetDriverVersion()) if ready else None


def _selected(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """As the CUDA runtime reads the variable: indices or UUID prefixes, cut off at the first unknown."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for item in filter(None, (part.strip() for part in visible.split(","))):
        found = [gpu for gpu in gpus if str(gpu.index) == item or gpu.uuid.startswith(item)]
        if not found:
            break
        chosen.append(found[0])
    return chosen


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        processes=_processes(handle),
        throttled=_throttled(handle),
        ecc_errors=_ecc_errors(handle),
        near_cores=_near_cores(handle),
    )


def _processes(handle: object) -> int | None:
    try:
        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except pynvml.NVMLError:
        return None


def _throttled(handle: object) -> bool | None:
    harmful = (
        pynvml.nvmlClocksThrottleReasonHwSlowdown
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    try:
        return bool(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & harmful)
    except pynvml.NVMLError:
        return None


def _ecc_errors(handle: object) -> int | None:
    try:
        return int(
            pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        )
    except pynvml.NVMLError:
        return None


def _near_cores(handle: object) -> tuple[int, ...]:
    words = (max(os.sched_getaffinity(0)) // 64) + 1
    try:
        mask = pynvml.nvmlDeviceGetCpuAffinity(handle, words)
    except pynvml.NVMLError:
        return ()
    return tuple(64 * w + bit for w, word in enumerate(mask) for bit in range(64) if word >> bit & 1)


def nccl_settings() -> dict[str, str]:
    """The `NCCL_*` variables that are set, without any that may hold a secret."""
    return {
        key: value
        for key, value in sorted(os.environ.items())
        if key.startswith("NCCL_") and not _SECRET.search(key)
    }


def usable_cores() -> list[int]:
    """The logical CPUs this process may use, whole physical cores first, at most as many as its quota.

    A second thread of a core comes after all first ones: two ranks on one core are not two cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    seen: set[str] = set()
    first: list[int] = []
    second: list[int] = []
    for cpu in allowed:
        siblings = _read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu)
        (second if siblings in seen else first).append(cpu)
        seen.add(siblings)
    quota = cgroup_quota()
    return (first + second)[: max(1, int(quota))] if quota is not None else first + second


def cgroup_quota() -> float | None:
    """CPUs that the control group of this process may use; None if it sets no limit."""
    text = _read(Path("/sys/fs/cgroup") / _cgroup_path() / "cpu.max") or _read(Path("/sys/fs/cgroup/cpu.max"))
    if text is None or text.startswith("max"):
        return None
    quota, period = text.split()
    return int(quota) / int(period)


def _cgroup_path() -> str:
    text = _read(Path("/proc/self/cgroup")) or ""
    match = re.search(r"^0::/(.*)$", text, re.MULTILINE)
    return match[1] if match else ""


def cpu_model() -> str:
    """The processor's marketing name, or `unknown`."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return match[1] if match else "unknown"


def on_battery() -> bool:
    """Whether a mains supply is there and offline."""
    supplies = Path("/sys/class/power_supply")
    types = [(path, _read(path / "type")) for path in supplies.glob("*")] if supplies.is_dir() else []
    mains = [path for path, kind in types if kind == "Mains"]
    return bool(mains) and all(_read(path / "online") == "0" for path in mains)


def slow_governor() -> str | None:
    """The frequency governor of the first core, if it is one that holds clocks down.

    Under the pstate drivers `powersave` is the ordinary, demand-driven governor.
    """
    folder = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    if "pstate" in (_read(folder / "scaling_driver") or ""):
        return None
    governor = _read(folder / "scaling_governor")
    return governor if governor in ("powersave", "conservative") else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
