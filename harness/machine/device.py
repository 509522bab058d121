"""Devices and cores of this machine by NVML and the kernel, without torch. The home of pynvml."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pynvml

from results.files import read

BUSY_GPU_BYTES = 2**30
"""Memory that the driver takes on an unused GPU, at most."""
CPUS = Path("/sys/devices/system/cpu")
INFINIBAND = Path("/sys/class/infiniband")
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
"""The devices of AMD's compute driver: CPUs, whose gpu_id is 0, and GPUs."""
ONLY_NVIDIA = "bench measures NVIDIA GPUs and CPU ranks only, and no AMD GPU"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device that this process may use, as NVML sees it; None where NVML gives no answer."""

    index: int
    """NVML's index less the devices before it that this process may not open, as CUDA counts."""
    name: str
    uuid: str
    memory_bytes: int | None = None
    used_bytes: int = 0
    processes: int | None = None
    """Compute processes on it."""
    throttled: bool | None = None
    ecc_errors: int | None = None
    """Uncorrected, since the driver was loaded."""
    near_cores: tuple[int, ...] = ()
    """Cores of its NUMA node; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGpu:
    """A CUDA device that is there and does not answer."""

    index: int
    why: str
    """NVML's words."""
    denied: bool = False
    """Whether this process may not open the device; `index` is then the index of NVML."""


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
    """The NVIDIA devices that answer, as far as `CUDA_VISIBLE_DEVICES` leaves them, in its order; empty
    without a driver."""
    with _nvml() as ready:
        gpus = [gpu for gpu in _devices() if isinstance(gpu, Gpu)] if ready else []
        return _selected(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")) if ready else []


def lost_gpus() -> list[LostGpu]:
    """The NVIDIA devices that do not answer, whatever `CUDA_VISIBLE_DEVICES` leaves.

    A device that this process may not open belongs to another job, because schedulers confine jobs, and is
    not lost; unless `CUDA_VISIBLE_DEVICES` names a device that is not found, or none can be opened.
    """
    with _nvml() as ready:
        devices = list(_devices()) if ready else []
        found = [gpu for gpu in devices if isinstance(gpu, Gpu)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        # The last two hide all devices.
        named = [item for item in (visible or "").split(",") if item.strip() not in ("", "-1", "NoDevFiles")]
        own = not found if visible is None else len(_selected(found, visible)) < len(named)
    return [gpu for gpu in devices if isinstance(gpu, LostGpu) and (own or not gpu.denied)]


def amd_gpus(nodes: Path = KFD) -> int:
    """The number of GPUs that AMD's compute driver (ROCm) shows on this machine."""
    return sum(read_fact(path) not in (None, "", "0") for path in nodes.glob("*/gpu_id"))


def driver_version() -> str | None:
    with _nvml() as ready:
        version = _answer(pynvml.nvmlSystemGetDriverVersion) if ready else None
        return None if version is None else str(version)


def _devices() -> Iterator[Gpu | LostGpu]:
    """All devices of this machine, by NVML's index."""
    denied = 0
    for index in range(_answer(pynvml.nvmlDeviceGetCount) or 0):
        try:
            yield _gpu(index - denied, pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
                denied += 1
                yield LostGpu(index=index, why=str(error), denied=True)
            else:
                yield LostGpu(index=index - denied, why=str(error))


def _selected(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """Select devices as the CUDA runtime does: by indices or UUID prefixes, up to the first unknown one."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for item in filter(None, (part.strip() for part in visible.split(","))):
        found = [gpu for gpu in gpus if str(gpu.index) == item or gpu.uuid.startswith(item)]
        if item.startswith("MIG-"):
            # A part of a GPU, of which NVML may know nothing but its name: torch says what it is.
            try:
                found = [_gpu(len(chosen), pynvml.nvmlDeviceGetHandleByUUID(item))]
            except pynvml.NVMLError:
                found = [Gpu(index=len(chosen), name="MIG device", uuid=item)]
        if not found:
            break
        chosen.append(found[0])
    return chosen


def _gpu(index: int, handle: object) -> Gpu:
    """Raises NVMLError for a device that does not answer."""
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = _answer(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    reasons = _answer(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    words = (max(os.sched_getaffinity(0)) // 64) + 1
    mask = _answer(pynvml.nvmlDeviceGetCpuAffinity, handle, words) or ()
    return Gpu(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        processes=None if processes is None else len(processes),
        throttled=None if reasons is None else bool(reasons & THROTTLING),
        ecc_errors=_ecc_errors(handle),
        near_cores=tuple(64 * w + bit for w, word in enumerate(mask) for bit in range(64) if word >> bit & 1),
    )


def gpu_warnings(gpus: Iterable[Gpu]) -> list[str]:
    """Warn of what would distort figures of these GPUs: other processes, throttling, ECC errors."""
    found = []
    for gpu in gpus:
        name = f"GPU {gpu.index} ({gpu.name})"
        if gpu.processes or gpu.used_bytes > BUSY_GPU_BYTES:
            found.append(
                f"{name} was in use at the start: {gpu.processes or 0} processes, "
                f"{gpu.used_bytes / 2**30:.1f} GiB taken"
            )
        if gpu.throttled:
            found.append(f"{name} was throttled at the start (heat or power)")
        if gpu.ecc_errors:
            found.append(f"{name} has {gpu.ecc_errors} uncorrected ECC errors")
    return found


def _answer(question: Callable[..., Any], *arguments: object) -> Any:
    """The answer of NVML to a question; None if it gives none."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _ecc_errors(handle: object) -> int | None:
    kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    errors: int | None = _answer(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, since)
    return errors


class NoReadingError(Exception):
    """NVML does not give a value; it says why."""


class GpuReader:
    """Readings of one GPU, one after another, while NVML is open."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def read(self, name: str) -> float:
        """A value of `GPU_READINGS` now. Raises NoReadingError."""
        return self._read(GPU_READINGS[name])

    def energy_j(self) -> float:
        """Energy that the GPU has used since its driver was loaded. Raises NoReadingError."""
        return self._read(pynvml.nvmlDeviceGetTotalEnergyConsumption) / 1e3

    def _read(self, question: Callable[[Any], float]) -> float:
        try:
            return float(question(self._handle))
        except pynvml.NVMLError as error:
            raise NoReadingError(str(error)) from error


@contextmanager
def gpu_reader(uuid: str) -> Iterator[GpuReader]:
    """Open NVML for the GPU of this UUID. Raises NoReadingError if NVML does not find it."""
    with _nvml() as ready:
        if not ready:
            raise NoReadingError("NVML does not start")
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise NoReadingError(f"{uuid}: {error}") from error
        yield GpuReader(handle)


_XIDS = {
    13: "an exception in a kernel",
    31: "an access to memory that is not mapped",
    43: "a kernel was stopped",
    45: "its work was stopped after another error",
    48: "an uncorrected ECC error",
    63: "a row of memory was put out of use",
    64: "a row of memory could not be put out of use",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "a contained ECC error",
    95: "an uncontained ECC error",
    119: "the GPU's own processor does not answer",
    120: "the GPU's own processor failed",
}
"""The meaning of the numbers in NVIDIA's catalogue of Xid errors (docs.nvidia.com/deploy/xid-errors)."""


class GpuFaults:
    """Errors that one GPU reports: Xid errors and uncorrected ECC errors."""

    def __init__(self, handle: object, events: object) -> None:
        """`events` is a set of NVML that receives the Xid errors of the GPU."""
        self._handle = handle
        self._events = events
        self._ecc = _ecc_errors(handle)

    def take(self) -> list[str]:
        """Return one sentence for each Xid number, and one for new uncorrected ECC errors, that the GPU has
        reported since the last call."""
        numbers: dict[int, None] = {}
        # Until no event is left, or the GPU is lost.
        with suppress(pynvml.NVMLError):
            while True:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    numbers[int(event.eventData)] = None
        found = [
            f"the GPU reported Xid {number} during the run: "
            + _XIDS.get(number, "see the catalogue of Xid errors")
            for number in numbers
        ]
        before, self._ecc = self._ecc, _ecc_errors(self._handle)
        if before is not None and self._ecc is not None and self._ecc > before:
            found.append(f"the GPU had {self._ecc - before} uncorrected ECC errors during the run")
        return found


@contextmanager
def gpu_faults(uuid: str) -> Iterator[GpuFaults | None]:
    """Listen to the GPU of this UUID from now on; None where NVML does not let this process."""
    with _nvml() as ready, ExitStack() as stack:
        faults = None
        if ready:
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                events = pynvml.nvmlEventSetCreate()
                stack.callback(_answer, pynvml.nvmlEventSetFree, events)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                faults = GpuFaults(handle, events)
        yield faults


def _pcie_bytes_per_s(handle: Any, counter: int) -> float:
    # NVML measures for 20 ms, and answers in KB/s.
    return 1e3 * float(pynvml.nvmlDeviceGetPcieThroughput(handle, counter))


def _nvlink_bytes(handle: Any, field: int) -> float:
    """Bytes that all NVLinks have carried; NVML counts in KiB. Raises NVMLError."""
    value = pynvml.nvmlDeviceGetFieldValues(handle, [(field, _ALL_LINKS)])[0]
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return 1024.0 * float(value.value.ullVal)


_ALL_LINKS = 2**32 - 1
"""The scope of a field of NVML that asks for the sum over links."""
GPU_READINGS: Mapping[str, Callable[[Any], float]] = MappingProxyType(
    {
        "gpu_utilisation_percent": lambda h: float(pynvml.nvmlDeviceGetUtilizationRates(h).gpu),
        "gpu_memory_used_bytes": lambda h: float(pynvml.nvmlDeviceGetMemoryInfo(h).used),
        "power_w": lambda h: float(pynvml.nvmlDeviceGetPowerUsage(h)) / 1e3,
        "sm_clock_mhz": lambda h: float(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": lambda h: float(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM)),
        "throttle_reasons": lambda h: float(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
        "temperature_c": lambda h: float(pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU)),
        "nvlink_sent_bytes": lambda h: _nvlink_bytes(h, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
        "nvlink_received_bytes": lambda h: _nvlink_bytes(h, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
        "pcie_sent_bytes_per_s": lambda h: _pcie_bytes_per_s(h, pynvml.NVML_PCIE_UTIL_TX_BYTES),
        "pcie_received_bytes_per_s": lambda h: _pcie_bytes_per_s(h, pynvml.NVML_PCIE_UTIL_RX_BYTES),
    }
)
"""The readings of a GPU; `nvlink_*` only grow."""
THROTTLING = int(
    pynvml.nvmlClocksThrottleReasonHwSlowdown
    | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
)
"""The bits of `throttle_reasons` for heat or a lack of power. The software power cap is not one of them: a
loaded GPU works at the limit of its power, and its figures are the figures of the device."""

_SETTINGS = re.compile(
    r"(TORCH_)?NCCL_.*|TORCH_DIST_USE_NCCL2|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|NVIDIA_TF32_OVERRIDE"
    r"|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_LAUNCH_BLOCKING"
)
"""Environment variables that change what a step of the same code costs."""
_OTHER_SETTINGS = re.compile(
    r"(?!.*_(NUM_THREADS|DIR|DIRECTORY|FILE)$)"
    r"((FI|OFI_NCCL|UCX|CUDA_MPS|OMP|KMP|GOMP|MKL|ONEDNN|DNNL|OPENBLAS|MALLOC|TCMALLOC|MIMALLOC|CUDNN|CUBLAS"
    r"|CUBLASLT|TORCHINDUCTOR|TORCHDYNAMO|TORCH_CUDNN|TORCH_BLAS)_.*|ATEN_CPU_CAPABILITY|LD_PRELOAD"
    r"|GLIBC_TUNABLES|GLOO_DEVICE_TRANSPORT|TORCH_(DISTRIBUTED_DEBUG|GLOO_LAZY_INIT|ALLOW_TF32_CUBLAS_OVERRIDE))"
)
"""Variables of other libraries that do the same. Numbers of threads have a field of the record, and paths
differ from job to job."""
LOGGING_OF_NCCL = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NET"}
"""With these variables NCCL logs how it connects, and nothing while it exchanges."""
_SET_IN_RANKS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **LOGGING_OF_NCCL}
"""Variables that torchrun and the worker set if the user did not; planning does not see them."""
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Both are set by the worker where the user set nothing (`harness.worker.rank.network`)."""
_NO_CONDITION = "NCCL_DEBUG_FILE"
"""A variable that is not a condition of a run: its path differs in every launch."""


def nccl_settings() -> dict[str, str]:
    """The variables of NCCL, torch, its allocator and CUDA that are set and change what a step costs, except
    variables that may hold a secret.
    """
    set_here = _SET_IN_RANKS | {NCCL_INTERFACE: f"={os.environ.get(GLOO_INTERFACE)}"}
    return {
        key: value
        for key, value in _set_as(_SETTINGS).items()
        if set_here.get(key) != value and key != _NO_CONDITION
    }


def other_settings() -> dict[str, str]:
    """The variables of libfabric, UCX, MPS, OpenMP, the libraries of linear algebra, allocators and torch's
    compiler that are set and change what a step costs, except variables that may hold a secret."""
    return _set_as(_OTHER_SETTINGS)


def _set_as(names: re.Pattern[str]) -> dict[str, str]:
    return {
        key: value
        for key, value in sorted(os.environ.items())
        if names.fullmatch(key) and not _SECRET.search(key)
    }


def rdma_devices(folder: Path = INFINIBAND) -> list[str]:
    """The devices of InfiniBand, RoCE or EFA that have a port that is up."""
    states = folder.glob("*/ports/*/state")
    return sorted({state.parts[-4] for state in states if "ACTIVE" in (read_fact(state) or "")})


def rdma_warnings(
    devices: Sequence[str], library: str = "libibverbs.so.1", status: Path = Path("/proc/self/status")
) -> list[str]:
    """A sentence for each thing that keeps NCCL from using these RDMA devices."""
    if not devices:
        return []
    found = []
    try:
        ctypes.CDLL(library)
    except OSError as error:
        found.append(
            f"NCCL cannot use {', '.join(devices[:4])} (RDMA) and will use TCP sockets: {error}; install "
            f"the libraries: apt-get install libibverbs1 ibverbs-providers librdmacm1"
        )
    capabilities = re.search(r"^CapEff:\s*(\w+)", read_fact(status) or "", re.MULTILINE)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and not (capabilities and int(capabilities[1], 16) & _CAP_IPC_LOCK):
        found.append(
            f"a process may lock {limit / 2**20:.3g} MiB of memory (ulimit -l), which may be too little for "
            f"NCCL over RDMA: type ulimit -l unlimited before the launch, add --ulimit memlock=-1 to docker "
            f"run, or have Slurm's slurmd started with LimitMEMLOCK=infinity"
        )
    return found


_CAP_IPC_LOCK = 1 << 14
"""The capability that exempts a process from the limit of locked memory (capabilities(7))."""


def usable_cores() -> list[int]:
    """The logical CPUs this process may use, whole physical cores first, at most as many as its quota.

    Second threads of cores follow all first threads, so that two ranks share a core only if they must.
    """
    cores = physical_cores(sorted(os.sched_getaffinity(0)))
    first, others = [core[0] for core in cores], sorted(cpu for core in cores for cpu in core[1:])
    quota = cgroup_quota()
    return (first + others)[: max(1, int(quota))] if quota is not None else first + others


def physical_cores(cpus: Iterable[int]) -> list[tuple[int, ...]]:
    """Logical CPUs by the physical core that they are threads of, in the order of its first one."""
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        siblings = read_fact(CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    return [tuple(core) for core in cores.values()]


def cgroup_quota(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that this process may use by its control group and the groups around it, whose smallest limit
    holds; None if none sets a limit.

    Sources: cgroup-v2.rst, cpu.max; scheduler/sched-bwc.rst, cpu.cfs_quota_us and cpu.cfs_period_us.
    """
    quotas = []
    for folder, version in control_groups("cpu", proc, cgroups):
        files = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        quota, *period = " ".join(read_fact(folder / name) or "" for name in files).split() or [""]
        if quota.isdigit() and period:
            quotas.append(int(quota) / int(period[0]))
    return min(quotas, default=None)


def control_groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the control groups by which `controller` limits this process, each with the
    version of its interface: the own group, the groups around it, and last the mounted root, which is the own
    group in a container."""
    for line in (read_fact(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        own, roots = Path(path.lstrip("/")), [cgroups]
        if controller in controllers.split(","):
            # Some hosts mount the controllers of one hierarchy only under their joined names, such as
            # cpu,cpuacct.
            roots = [cgroups / controller, cgroups / controllers, cgroups]
        elif controllers:
            continue
        root = next((at for at in roots if at.is_dir()), cgroups)
        yield from ((root / part, 1 if controllers else 2) for part in (own, *own.parents))


def cpu_model() -> str:
    """The processor's marketing name, or `unknown`."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_fact(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return match[1] if match else "unknown"


def on_battery() -> bool:
    """Whether a mains supply is there and offline."""
    supplies = Path("/sys/class/power_supply")
    types = [(path, read_fact(path / "type")) for path in supplies.glob("*")] if supplies.is_dir() else []
    mains = [path for path, kind in types if kind == "Mains"]
    return bool(mains) and all(read_fact(path / "online") == "0" for path in mains)


def slow_governor() -> str | None:
    """The frequency governor of the first core, if it is one that holds clocks down.

    Under the pstate drivers `powersave` is the ordinary, demand-driven governor.
    """
    folder = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    if "pstate" in (read_fact(folder / "scaling_driver") or ""):
        return None
    governor = read_fact(folder / "scaling_governor")
    return governor if governor in ("powersave", "conservative") else None


def read_fact(path: Path) -> str | None:
    """The text of a small file of the kernel without blanks at its ends; None if it cannot be read."""
    try:
        return read(path).text.strip()
    except OSError:
        return None
