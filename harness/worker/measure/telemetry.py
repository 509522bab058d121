"""Telemetry: a separate thread samples this rank's device and host while the timed blocks run.

============================== ======================================================== ==============
series                         what it is                                               from
============================== ======================================================== ==============
`cpu_cores`                    CPU time of this process, all its threads, over wall     kernel
                               time; processes of a data loader are not in it
`rss_bytes`                    resident memory of this process                          psutil
`network_sent_bytes_per_s`     what all interfaces of this network namespace sent,      psutil
                               loopback (by which ranks of a host talk) included
`network_received_bytes_per_s` what they received                                       psutil
`gpu_utilisation_percent`      share of the last NVML period with a kernel running      NVML
`gpu_memory_used_bytes`        memory in use on the device, by all processes            NVML
`power_w`                      power of the device                                      NVML
`sm_clock_mhz`                 clock of the multiprocessors                             NVML
`memory_clock_mhz`             clock of the memory                                      NVML
`throttle_reasons`             why clocks are lower than they could be: NVML's bits     NVML
`throttled`                    1 if a bit for heat or a lack of power is set, or 0;      derived
                               a GPU at its power limit is not throttled
`temperature_c`                temperature of the chip                                  NVML
`pcie_sent_bytes_per_s`        PCIe traffic over 20 ms                                  NVML
`pcie_received_bytes_per_s`    the same, received                                       NVML
`nvlink_sent_bytes_per_s`      payload over all NVLinks                                 NVML
`nvlink_received_bytes_per_s`  the same, received                                       NVML
============================== ======================================================== ==============

The warm-up on a GPU is sampled too, for the clock that ends it; its samples are not kept.
A series is there if the device gives it. Network series are of the host, and kept by its local rank 0.
Series made from a counter (`cpu_cores`, network, NVLink) are the mean since the sample before, so the first
sample lacks them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType

import msgspec
import psutil
import torch

from harness.machine.device import GPU_READINGS, THROTTLING, GpuReader, NoReadingError, gpu_reader
from harness.worker.rank.context import device_uuid
from harness.worker.rank.rank import Rank
from harness.worker.rank.usage import rss_bytes
from results.record import Telemetry

INTERVAL_S = 0.5
PATIENCE_S = 10.0
"""Seconds to wait for a reading that is under way when measuring ends."""
MOST_SAMPLES = 120
"""When more samples are kept, every other one is dropped and the interval doubles."""
RATES = MappingProxyType(
    {
        "cpu_s": "cpu_cores",
        "network_sent_bytes": "network_sent_bytes_per_s",
        "network_received_bytes": "network_received_bytes_per_s",
        "nvlink_sent_bytes": "nvlink_sent_bytes_per_s",
        "nvlink_received_bytes": "nvlink_received_bytes_per_s",
    }
)
"""The series that a counter becomes; any other reading is a series as it is."""
DECIMALS = MappingProxyType({"cpu_cores": 3, "power_w": 1})
"""Decimals that are kept in these series; values of all others are rounded to whole units."""

Column = list[float | None]
Read = Callable[[], float]


class Samples:
    """Readings with their times; thinned out evenly when there are too many."""

    def __init__(self, *, interval_s: float = INTERVAL_S, most: int = MOST_SAMPLES) -> None:
        self.interval_s = interval_s
        """Seconds from one sample to the next."""
        self._most = most
        self._rows: list[tuple[int, Mapping[str, float]]] = []

    def add(self, at_ns: int, row: Mapping[str, float], *, last: bool = False) -> None:
        """Keep what was read at a time; a reading that failed is left out of `row`.

        The last one takes the place of one just before it: a rate over next to no time says nothing.
        """
        if last and len(self._rows) > 1 and at_ns < self._rows[-1][0] + 0.5e9 * self.interval_s:
            self._rows.pop()
        self._rows.append((at_ns, row))
        if len(self._rows) > self._most:
            self._rows = self._rows[::2]
            self.interval_s *= 2

    def recent(self, name: str, seconds: float) -> list[float]:
        """Return the readings called `name` of the last `seconds` before the newest sample, in order."""
        rows = list(self._rows)
        since_ns = rows[-1][0] - seconds * 1e9
        return [row[name] for at_ns, row in rows if at_ns >= since_ns and name in row]

    def due_ns(self) -> int:
        """When the next sample is due."""
        return self._rows[-1][0] + round(self.interval_s * 1e9)

    def telemetry(self, start_ns: int) -> Telemetry:
        """All series, each in the order of the samples; those without any value are left out."""
        at_ns = [at for at, _ in self._rows]
        names = dict.fromkeys(name for _, row in self._rows for name in row)
        series: dict[str, Column] = {}
        for name in names:
            column = [row.get(name) for _, row in self._rows]
            if name in RATES:
                series[RATES[name]] = rates(at_ns, column)
            else:
                series[name] = column
        if "throttle_reasons" in series:
            series["throttled"] = _of_known(
                series["throttle_reasons"], lambda mask: float(int(mask) & THROTTLING != 0)
            )
        return Telemetry(
            at_ms=[round((at - start_ns) / 1e6) for at in at_ns],
            series={
                name: _of_known(values, partial(round, ndigits=DECIMALS.get(name, 0)))
                for name, values in series.items()
            },
        )


def _of_known(column: Column, function: Callable[[float], float]) -> Column:
    return [None if value is None else function(value) for value in column]


def rates(at_ns: Sequence[int], counts: Sequence[float | None]) -> Column:
    """Growth of a counter per second since the reading before; None without one, or where it went back."""
    found: Column = [None]
    for i in range(1, len(counts)):
        before, now = counts[i - 1], counts[i]
        grown = None if before is None or now is None else now - before
        found.append(None if grown is None or grown < 0 else 1e9 * grown / (at_ns[i] - at_ns[i - 1]))
    return found


class TelemetrySampler:
    """Samples at the entry, at the exit, and between them in a separate thread."""

    def __init__(
        self,
        readings: Mapping[str, Read],
        *,
        energy_j: Read | None = None,
        missing: Mapping[str, str] | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`readings` raise where a value is missing; `missing` gives reasons for what cannot be read."""
        self._missing: dict[str, str] = dict(missing or {})
        self._readings = dict(readings)
        self._energy_j = energy_j
        self._samples = Samples(interval_s=interval_s)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="telemetry", daemon=True)
        self._start_ns = 0
        self._energies: list[tuple[int, float]] = []

    def __enter__(self) -> TelemetrySampler:
        self._start_ns = time.perf_counter_ns()
        self._samples.add(time.perf_counter_ns(), self._row())
        self._read_energy()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            # A driver that hangs is no reason to hang: what there is stays, and nothing more is asked.
            self._missing["later sample"] = f"a reading did not answer for {PATIENCE_S:g} s"
            return
        self._read_energy()
        self._samples.add(time.perf_counter_ns(), self._row(), last=True)

    @property
    def absent(self) -> dict[str, str]:
        """The reasons for missing energy and missing series."""
        found = dict(self._missing)
        energy = found.pop("energy_j", None)
        if self._energy_j is None:
            energy = "no energy counter is read on this device"
        series = "; ".join(f"no {name}: {why}" for name, why in found.items())
        return ({"energy_j": energy} if energy else {}) | ({"telemetry": series} if series else {})

    def clock_mhz(self, seconds: float) -> list[float]:
        """Return the readings of the multiprocessors' clock of the last `seconds`; the list is empty where
        NVML does not give them."""
        return self._samples.recent("sm_clock_mhz", seconds)

    def telemetry(self) -> Telemetry:
        """Return all samples; call it after the `with` block of this object has ended."""
        found = self._samples.telemetry(self._start_ns)
        if len(self._energies) < 2:
            return found
        (first_ns, first_j), (last_ns, last_j) = self._energies
        return msgspec.structs.replace(found, window_ns=last_ns - first_ns, energy_j=last_j - first_j)

    def _sample(self) -> None:
        while not self._over.wait(max(0.0, (self._samples.due_ns() - time.perf_counter_ns()) / 1e9)):
            self._samples.add(time.perf_counter_ns(), self._row())

    def _row(self) -> dict[str, float]:
        row = {}
        for name, read in list(self._readings.items()):
            value = self._try(name, read)
            if value is None:
                # A reading that failed once is not tried again.
                del self._readings[name]
            else:
                row[name] = value
        return row

    def _read_energy(self) -> None:
        energy_j = None if self._energy_j is None else self._try("energy_j", self._energy_j)
        if energy_j is not None:
            self._energies.append((time.perf_counter_ns(), energy_j))

    def _try(self, name: str, read: Read) -> float | None:
        try:
            return read()
        except Exception as error:
            # Whatever a driver or a kernel does not tell, the run is good without.
            self._missing[name] = str(error) or type(error).__name__
            return None


@contextmanager
def sampler(device: torch.device, rank: Rank) -> Iterator[TelemetrySampler]:
    """A Sampler of what this rank has: its process, its host (local rank 0), and on CUDA its GPU."""
    with ExitStack() as stack:
        readings = {**process_readings(), **(host_readings() if rank.local_rank == 0 else {})}
        if device.type != "cuda":
            yield stack.enter_context(TelemetrySampler(readings))
            return
        try:
            gpu = stack.enter_context(gpu_reader(device_uuid(device)))
        except NoReadingError as error:
            sampling = TelemetrySampler(readings, missing={"series of the GPU": str(error)})
        else:
            sampling = TelemetrySampler({**readings, **gpu_readings(gpu)}, energy_j=gpu.energy_j)
        yield stack.enter_context(sampling)


def process_readings() -> dict[str, Read]:
    # The CPU time that psutil returns is in ticks of 10 ms, and a sample may be over 500.
    return {"cpu_s": time.process_time, "rss_bytes": rss_bytes}


def host_readings() -> dict[str, Read]:
    # `nowrap=False`: psutil does not correct counters that started again; `rates` sees that they went back.
    return {
        "network_sent_bytes": lambda: psutil.net_io_counters(nowrap=False).bytes_sent,
        "network_received_bytes": lambda: psutil.net_io_counters(nowrap=False).bytes_recv,
    }


def gpu_readings(gpu: GpuReader) -> dict[str, Read]:
    return {name: partial(gpu.read, name) for name in GPU_READINGS}
