"""Samples: evenly thinned, rates by hand, the kernel's own figures for real, and a GPU that is a fake."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_builders import CPU, a_rank

from harness.machine import device
from harness.machine.device import GPU_READINGS, NoReadingError, gpu_reader
from harness.worker.measure import telemetry
from harness.worker.measure.telemetry import (
    MOST_SAMPLES,
    RATES,
    Samples,
    TelemetrySampler,
    gpu_readings,
    host_readings,
    process_readings,
    rates,
    sampler,
)

S = 1_000_000_000
MIB = 2**20


def samples_of(*rows: Mapping[str, float], most: int = MOST_SAMPLES) -> Samples:
    """Samples that were taken a second apart."""
    samples = Samples(interval_s=1.0, most=most)
    for second, row in enumerate(rows):
        samples.add(second * S, row)
    return samples


# Thinning and rates


@given(count=st.integers(1, 2000), most=st.integers(20, 130))
def test_samples_stay_even_and_few_however_long_it_takes(count, most) -> None:
    samples = Samples(interval_s=1.0, most=most)
    at_ns = 0
    for _ in range(count):
        samples.add(at_ns, {"rss_bytes": at_ns})
        at_ns = samples.due_ns()
    at_ms = samples.telemetry(0).at_ms
    assert len(at_ms) <= most
    assert at_ms[0] == 0
    assert {b - a for a, b in pairwise(at_ms)} <= {round(samples.interval_s * 1000)}


def test_times_are_from_the_start_of_measuring() -> None:
    samples = Samples()
    samples.add(7 * S + 2_600_000, {})
    assert samples.telemetry(7 * S).at_ms == [3]


def test_the_latest_readings_are_of_so_many_seconds_without_those_that_failed() -> None:
    samples = samples_of({"mhz": 1.0}, {"mhz": 2.0}, {}, {"mhz": 4.0, "w": 9.0})
    assert (samples.recent("mhz", 2.0), samples.recent("other", 2.0)) == ([2.0, 4.0], [])


def test_a_counter_becomes_its_growth_a_second_over_the_samples_that_are_kept() -> None:
    # 30 bytes in 2 s, 10 bytes in half a second.
    assert rates([0, 2 * S, 2 * S + S // 2], [100, 130, 140]) == [None, 15.0, 20.0]
    # A counter that began again, or that was not read, says nothing of the time before.
    assert rates([0, S, 2 * S, 3 * S, 4 * S], [5, 1, 2, None, 9]) == [None, None, 1.0, None, None]
    assert rates([0], [5]) == [None]


def test_a_dropped_sample_takes_nothing_from_the_total_of_a_rate() -> None:
    samples = samples_of(*({"network_sent_bytes": count} for count in (0, 100, 130)), most=2)
    # The sample at 1 s is gone: 130 bytes in 2 s, not the mean of the last second.
    assert samples.telemetry(0).series == {"network_sent_bytes_per_s": [None, 65.0]}


@pytest.mark.parametrize(
    ("before", "last_s", "at_ms"),
    # The first sample is kept however soon the last one comes.
    [(2, 1.4, [0, 1400]), (2, 1.6, [0, 1000, 1600]), (1, 0.1, [0, 100])],
)
def test_the_last_sample_takes_the_place_of_one_just_before_it(before, last_s, at_ms) -> None:
    samples = samples_of(*[{}] * before)
    samples.add(round(last_s * S), {}, last=True)
    assert samples.telemetry(0).at_ms == at_ms


def test_values_are_rounded_to_what_they_are_good_for() -> None:
    samples = samples_of(
        {"power_w": 312.456, "cpu_s": 0.0, "rss_bytes": 5.4},
        {"power_w": 99.96, "cpu_s": 0.98765, "rss_bytes": 5.6},
    )
    expected = {"power_w": [312.5, 100.0], "cpu_cores": [None, 0.988], "rss_bytes": [5, 6]}
    assert samples.telemetry(0).series == expected


@pytest.mark.parametrize(
    # NVML's bits: 1 idle, 2 clocks that were set, 4 software power cap, 8 hardware slowdown, 32 and 64 heat
    # (told by software and hardware), 128 power brake.
    ("mask", "throttled"),
    [(0, 0.0), (1, 0.0), (2, 0.0), (4, 0.0), (5, 0.0), (8, 1.0), (12, 1.0), (32, 1.0), (64, 1.0), (128, 1.0)],
)
def test_heat_and_a_lack_of_power_throttle_and_a_power_limit_does_not(mask, throttled) -> None:
    samples = samples_of({"throttle_reasons": mask})
    assert samples.telemetry(0).series == {"throttle_reasons": [mask], "throttled": [throttled]}


# The thread


def test_samples_come_at_the_start_at_every_interval_and_at_the_end() -> None:
    main = threading.get_ident()
    threads = []
    enough = threading.Event()

    def read() -> float:
        threads.append(threading.get_ident())
        if len(threads) == 4:
            enough.set()
        return len(threads)

    with TelemetrySampler({"rss_bytes": read}, interval_s=0.1) as sampling:
        assert enough.wait(60)
    found = sampling.telemetry()
    # At 0, 100, 200, 300 ms and at the end, which takes the place of one just before it; a busy machine is
    # late, and never early.
    assert len(found.at_ms) >= 4
    *gaps, last = [b - a for a, b in pairwise(found.at_ms)]
    assert all(gap >= 99 for gap in gaps)
    assert last >= 49
    # The calling thread reads before and after what is timed, never meanwhile.
    assert threads[0] == threads[-1] == main
    assert main not in threads[1:-1]
    assert not [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_the_thread_ends_with_an_error_of_the_blocks() -> None:
    with pytest.raises(ZeroDivisionError), TelemetrySampler({}, interval_s=60):
        _ = 1 / 0
    assert not [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_what_fails_is_left_out_and_named_and_not_asked_again() -> None:
    asked: list[str] = []
    failed = threading.Event()

    def after_two() -> float:
        asked.append("late")
        if len(asked) > 2:
            failed.set()
            raise RuntimeError("GPU is lost")
        return 7.0

    def never() -> float:
        raise NoReadingError("Not Supported")

    with TelemetrySampler({"sm_clock_mhz": never, "power_w": after_two}, interval_s=0.02) as sampling:
        assert failed.wait(60)
    found = sampling.telemetry()
    assert set(found.series) == {"power_w"}
    assert found.series["power_w"][:2] == [7.0, 7.0]
    assert set(found.series["power_w"][2:]) == {None}
    assert len(asked) == 3
    assert sampling.absent["telemetry"] == "no sm_clock_mhz: Not Supported; no power_w: GPU is lost"


def test_a_reading_that_never_answers_ends_nothing_but_the_samples(monkeypatch) -> None:
    monkeypatch.setattr(telemetry, "PATIENCE_S", 0.05)
    reached, gone, asked = threading.Event(), threading.Event(), []

    def stuck() -> float:
        asked.append(1)
        if len(asked) > 1:
            reached.set()
            gone.wait(60)
        return 7.0

    try:
        with TelemetrySampler({"power_w": stuck}, interval_s=0.01) as sampling:
            assert reached.wait(60)
        assert sampling.telemetry().series == {"power_w": [7.0]}
        assert sampling.absent["telemetry"] == "no later sample: a reading did not answer for 0.05 s"
    finally:
        gone.set()


# The process and its host, for real


def test_cpu_time_of_all_threads_is_counted_in_cores() -> None:
    # The first and the last sample are each taken between two readings of the same clocks, however long this
    # process waits for a core there.
    def now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    outer = now()
    with TelemetrySampler(process_readings(), interval_s=60) as sampling:
        inner = now()
        worker = threading.Thread(target=lambda: sum(i * i for i in range(2_000_000)))
        worker.start()
        worker.join()
        least_cpu_s, least_s = (after - before for after, before in zip(now(), inner, strict=True))
    most_cpu_s, most_s = (after - before for after, before in zip(now(), outer, strict=True))
    [first, second] = sampling.telemetry().series["cpu_cores"]
    assert first is None
    assert second is not None
    rounding = 0.0005
    assert least_cpu_s / most_s - rounding <= second <= most_cpu_s / least_s + rounding


def test_bytes_over_the_loopback_are_network_bytes() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()
    with server, sender, receiver, TelemetrySampler(host_readings(), interval_s=60) as sampling:
        thread = threading.Thread(target=lambda: sender.sendall(bytes(20 * MIB)) or sender.close())
        thread.start()
        while receiver.recv(MIB):
            pass
        thread.join()
    found = sampling.telemetry()
    seconds = (found.at_ms[1] - found.at_ms[0]) / 1000
    for name in ("network_sent_bytes_per_s", "network_received_bytes_per_s"):
        rate = found.series[name][1]
        assert rate is not None
        # Times are kept in milliseconds. Others may use the interfaces meanwhile, none can take bytes away.
        assert rate * (seconds + 0.002) >= 20 * MIB


def test_only_the_first_rank_of_a_host_samples_the_host() -> None:
    found = []
    for local_rank in (0, 1):
        with sampler(CPU, a_rank(local_rank, 2)) as sampling:
            pass
        found.append(set(sampling.telemetry().series))
        assert sampling.absent == {"energy_j": "no energy counter is read on this device"}
    process = {"cpu_cores", "rss_bytes"}
    assert found == [process | {"network_sent_bytes_per_s", "network_received_bytes_per_s"}, process]


def test_every_series_is_in_the_table() -> None:
    readings = {**process_readings(), **host_readings(), **GPU_READINGS}
    names = {RATES.get(name, name) for name in readings} | {"throttled"}
    rows = {line.split("`")[1] for line in telemetry.__doc__.splitlines() if line.startswith("`")}
    assert rows == names
    assert set(RATES) <= set(readings)


# A GPU. There is none here: the fake answers as NVML's documentation says that an NVIDIA H200 would.

ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=41),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_754_820_096, used=81_604_378_624, free=0),
    "nvmlDeviceGetPowerUsage": 612_345,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
    "nvmlDeviceGetTemperature": 61,
}
CLOCKS = {device.pynvml.NVML_CLOCK_SM: 1830, device.pynvml.NVML_CLOCK_MEM: 3201}
PCIE = {device.pynvml.NVML_PCIE_UTIL_TX_BYTES: 1500, device.pynvml.NVML_PCIE_UTIL_RX_BYTES: 250}
NVLINK = {138: 3 * 2**20, 139: 2**20}
UUID = "GPU-11111111-2222-3333-4444-555555555555"


class FakeNvml:
    """NVML's functions over one handle. What is named in `broken` is not supported."""

    def __init__(self) -> None:
        self.open = 0
        self.broken: set[str] = set()
        self.energies_mj = [5_000_000, 5_123_500]

    def answer(self, name: str, value: Callable[..., Any]) -> Callable[..., Any]:
        def call(handle: object, *arguments: Any) -> Any:
            assert handle == "handle"
            assert self.open
            if name in self.broken:
                raise device.pynvml.NVMLError(device.pynvml.NVML_ERROR_NOT_SUPPORTED)
            return value(*arguments)

        return call

    def init(self) -> None:
        self.open += 1

    def shutdown(self) -> None:
        self.open -= 1

    def handle(self, uuid: str) -> str:
        if uuid != UUID:
            raise device.pynvml.NVMLError(device.pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"


def _fields(asked: list[tuple[int, int]]) -> list[SimpleNamespace]:
    [(field, scope)] = asked
    assert scope == 2**32 - 1
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=NVLINK[field]))]


@pytest.fixture
def nvml(monkeypatch) -> Iterator[FakeNvml]:
    fake = FakeNvml()
    calls: dict[str, Callable[..., Any]] = {
        **{name: (lambda value=value: value) for name, value in ANSWERS.items()},
        "nvmlDeviceGetTemperature": lambda sensor: ANSWERS["nvmlDeviceGetTemperature"],
        "nvmlDeviceGetClockInfo": CLOCKS.__getitem__,
        "nvmlDeviceGetPcieThroughput": PCIE.__getitem__,
        "nvmlDeviceGetFieldValues": _fields,
        "nvmlDeviceGetTotalEnergyConsumption": lambda: fake.energies_mj.pop(0),
    }
    for name, value in calls.items():
        monkeypatch.setattr(device.pynvml, name, fake.answer(name, value))
    monkeypatch.setattr(device.pynvml, "nvmlInit", fake.init)
    monkeypatch.setattr(device.pynvml, "nvmlShutdown", fake.shutdown)
    monkeypatch.setattr(device.pynvml, "nvmlDeviceGetHandleByUUID", fake.handle)
    yield fake
    assert fake.open == 0


def test_every_reading_of_a_gpu_has_the_unit_of_its_name(nvml) -> None:
    with gpu_reader(UUID) as gpu:
        found = {name: read() for name, read in gpu_readings(gpu).items()}
    assert found == {
        "gpu_utilisation_percent": 97.0,
        "gpu_memory_used_bytes": 81_604_378_624.0,
        # 612,345 mW
        "power_w": 612.345,
        "sm_clock_mhz": 1830.0,
        "memory_clock_mhz": 3201.0,
        "throttle_reasons": 4.0,
        "temperature_c": 61.0,
        # 3 x 2^20 KiB and 2^20 KiB
        "nvlink_sent_bytes": 3.0 * 2**30,
        "nvlink_received_bytes": 1.0 * 2**30,
        # 1,500 KB/s and 250 KB/s
        "pcie_sent_bytes_per_s": 1_500_000.0,
        "pcie_received_bytes_per_s": 250_000.0,
    }


def test_energy_is_the_growth_of_the_counter_over_its_window(nvml) -> None:
    with gpu_reader(UUID) as gpu, TelemetrySampler({}, energy_j=gpu.energy_j) as sampling:
        time.sleep(0.05)
    found = sampling.telemetry()
    # 5,123,500 mJ - 5,000,000 mJ
    assert found.energy_j == pytest.approx(123.5)
    assert found.window_ns is not None
    assert 50_000_000 <= found.window_ns < 5 * S
    assert sampling.absent == {}


def test_what_a_gpu_does_not_tell_is_absent_with_nvmls_words(nvml) -> None:
    nvml.broken = {"nvmlDeviceGetFieldValues", "nvmlDeviceGetTotalEnergyConsumption"}
    with gpu_reader(UUID) as gpu, TelemetrySampler(gpu_readings(gpu), energy_j=gpu.energy_j) as sampling:
        pass
    found = sampling.telemetry()
    assert not [name for name in found.series if name.startswith("nvlink")]
    # 4: the power limit, at which a loaded GPU always is.
    assert found.series["throttled"] == [0.0, 0.0]
    assert found.energy_j is None
    assert found.window_ns is None
    assert sampling.absent == {
        "energy_j": "Not Supported",
        "telemetry": "no nvlink_sent_bytes: Not Supported; no nvlink_received_bytes: Not Supported",
    }


def test_a_field_that_nvml_refuses_by_itself_is_absent(nvml, monkeypatch) -> None:
    refused = [SimpleNamespace(nvmlReturn=device.pynvml.NVML_ERROR_NOT_SUPPORTED, value=None)]
    monkeypatch.setattr(device.pynvml, "nvmlDeviceGetFieldValues", lambda handle, fields: refused)
    with gpu_reader(UUID) as gpu, pytest.raises(NoReadingError, match="Not Supported"):
        gpu.read("nvlink_sent_bytes")


def cuda(monkeypatch: pytest.MonkeyPatch, uuid: str) -> torch.device:
    properties = SimpleNamespace(name="NVIDIA H200", uuid=uuid.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return torch.device("cuda", 0)


def test_a_cuda_rank_samples_its_own_gpu_beside_its_process(nvml, monkeypatch) -> None:
    with sampler(cuda(monkeypatch, UUID), a_rank(1, 2)) as sampling:
        pass
    found = sampling.telemetry()
    assert found.series["power_w"] == [612.3, 612.3]
    # The counters of the fake stand still.
    assert found.series["nvlink_sent_bytes_per_s"] == [None, 0.0]
    assert found.energy_j == pytest.approx(123.5)
    assert "rss_bytes" in found.series
    assert sampling.absent == {}


def test_without_its_gpu_a_cuda_rank_still_samples_its_process(nvml, monkeypatch) -> None:
    other = "GPU-99999999-2222-3333-4444-555555555555"
    with sampler(cuda(monkeypatch, other), a_rank(1, 2)) as sampling:
        pass
    assert set(sampling.telemetry().series) == {"cpu_cores", "rss_bytes"}
    assert sampling.absent["telemetry"] == f"no series of the GPU: {other}: Not Found"


def test_without_a_driver_there_is_no_gpu_to_read(monkeypatch) -> None:
    def fails() -> None:
        raise device.pynvml.NVMLError(device.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(device.pynvml, "nvmlInit", fails)
    with pytest.raises(NoReadingError, match="NVML does not start"), gpu_reader(UUID):
        pass
