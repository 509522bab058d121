"""The parts of a launch: its command, its logs, its end, and what goes before it."""

from __future__ import annotations

import ast
import io
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest
import torch
from builders import a_cell, an_environment
from launching import EMPTY_PLAN, a_launch, a_result

from harness import cli
from harness.launch import preflight
from harness.launch.command import torchrun_command, worker_environment
from harness.launch.conduct import Deadline, Pace
from harness.launch.ending import Seen, asked_to_end, judged, rank_exits
from harness.launch.follow import LaunchState, LogTail, Pulse
from harness.launch.tally import Conditions, study_tally, uncounted
from harness.machine import device
from harness.machine.code import checkout, code_version, what_runs
from harness.machine.device import amd_gpus, nccl_settings, other_settings
from harness.machine.torch_devices import TorchDevices, ask_torch, torch_version
from harness.plan.estimate import Earlier, LaunchTime
from harness.plan.surroundings import Machine
from harness.terminal.console import Standing
from harness.worker.__main__ import _near
from harness.worker.crew import _device
from harness.worker.rank.context import device_uuid
from harness.worker.rank.rank import Rank
from results.environment import CodeVersion
from results.errors import MachineError
from results.job import RunOptions
from results.launch import RankExit, rank_log_path, torchrun_folder
from results.outcome import Ending, Evidence, Outcome
from results.plan import Placement
from results.run import RunResult
from results.statistics import Metric
from results.store import Study


def test_the_command_of_one_node_is_a_standalone_torchrun() -> None:
    command = torchrun_command(a_launch(), Path("/s/launches/L/launch.json"), python="python")
    assert " ".join(command) == (
        "python -m torch.distributed.run --nproc-per-node=2 --standalone --local-addr=127.0.0.1 "
        "--log-dir=/s/launches/L/torchrun --redirects=3 -m harness.worker /s/launches/L/launch.json"
    )


def test_the_command_of_several_nodes_meets_at_the_first() -> None:
    command = torchrun_command(
        a_launch(nodes=4, gpus_per_node=8),
        Path("/s/launches/L/launch.json"),
        node_rank=3,
        endpoint="n0:29500",
        python="python",
    )
    assert " ".join(command) == (
        "python -m torch.distributed.run --nproc-per-node=8 --nnodes=4 --node-rank=3 --rdzv-backend=static "
        "--rdzv-endpoint=n0:29500 --rdzv-id=20260102T030405Z-abcdef "
        "--log-dir=/s/launches/L/torchrun/node-3 --redirects=3 -m harness.worker /s/launches/L/launch.json"
    )


def test_workers_find_our_packages_first_and_use_one_thread(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    found = worker_environment(a_launch(), Path("/ours"))
    assert (found["PYTHONSAFEPATH"], found["OMP_NUM_THREADS"]) == ("1", "1")
    assert found["PYTHONPATH"] == "/ours:/theirs"


FOREIGN = {
    "RANK": "7", "LOCAL_RANK": "3", "GROUP_RANK": "2", "ROLE_NAME": "x", "WORLD_SIZE": "9",
    "LOCAL_WORLD_SIZE": "9", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "1", "PET_NNODES": "2",
    "OMPI_COMM_WORLD_RANK": "7", "PMI_RANK": "7", "PMIX_RANK": "7",
}  # fmt: skip
"""Other launchers leave such variables. With PET_NNODES alone torchrun waits for another node."""
NAMELESS = ("unshare", "--uts", "sh", "-c", 'hostname i-7840df31; "$0" -m harness.cli doctor; exec "$0" "$@"')
"""Before a command of Python: `bench doctor`, and then the command, on a host whose name does not resolve."""


def test_workers_get_no_variable_of_another_launcher_and_all_others(monkeypatch) -> None:
    others = {"SLURM_PROCID": "7", "LOCAL_SCRATCH": "/s", "NCCL_DEBUG": "INFO", "RANKS": "2", "PETS": "2"}
    for name, value in {**FOREIGN, **others}.items():
        monkeypatch.setenv(name, value)
    found = worker_environment(a_launch(), Path("/ours"))
    assert (FOREIGN.keys() & found.keys(), others.items() - found.items()) == (set(), set())


@pytest.mark.slow
def test_a_launch_of_one_host_needs_neither_its_name_nor_what_others_left(bench_in, tmp_path) -> None:
    # Only root may change the host name of a namespace.
    before, bench = NAMELESS if os.geteuid() == 0 else (), bench_in(tmp_path)
    call = (*before, sys.executable, "-m", "harness.cli", "matrix", *bench.counted, *("--max-time", "8m"))
    cell = ("--workload", "mlp", "--gpus", "2", "--oversubscribe", "--no-report", "--out", "study")
    variables = {**os.environ, **FOREIGN}
    done = subprocess.run((*call, *cell), cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, [run.outcome for run in bench.results()]) == (0, [Outcome.OK])
    assert ("warning   the name of this host, i-7840df31, does not resolve" in done.stdout) == bool(before)


_seen = partial(Seen, started=("r",))
"""The signs of a launch in which a run began."""


# What torchrun 2.13 printed when rank 1 of 2 was killed by the kernel, hosts and paths shortened.
KILLED = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
harness.worker FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_04:24:50
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 14610)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 14610
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_04:24:50
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 14611)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 14611
============================================================
"""


def test_torchruns_report_is_read_and_its_own_sigterm_blamed_on_nobody(tmp_path) -> None:
    (tmp_path / "torchrun.log").write_text(KILLED)
    exits = rank_exits(tmp_path)
    assert [(exit.rank, exit.signal, exit.exit_code) for exit in exits] == [
        (0, "SIGTERM", None),
        (1, "SIGKILL", None),
    ]
    assert judged(_seen(exits=exits)) == (Outcome.CRASHED, "rank 1 was killed by SIGKILL")


def test_a_rank_that_raised_is_quoted_from_its_error_file(tmp_path) -> None:
    error = tmp_path / "torchrun" / "x" / "attempt_0" / "1" / "error.json"
    error.parent.mkdir(parents=True)
    error.write_text(json.dumps({"message": {"message": "OSError: [Errno 28] No space left on device"}}))
    report = f"  rank      : 1 (local_rank: 0)\n  exitcode  : 1 (pid: 7)\n  error_file: {error}\n"
    (tmp_path / "torchrun.log").write_text(report)
    exits = rank_exits(tmp_path)
    assert judged(_seen(exits=exits)) == (
        Outcome.CANCELLED,
        "the disk is full: rank 1: OSError: [Errno 28] No space left on device",
    )
    error.write_text(json.dumps({"message": {"message": "ValueError: no room in the model"}}))
    assert judged(_seen(exits=rank_exits(tmp_path))) == (
        Outcome.CRASHED,
        "rank 1: ValueError: no room in the model",
    )


def _exit(rank: int, *, code: int | None = None, by: str | None = None) -> RankExit:
    return RankExit(rank=rank, exit_code=code, signal=by, message=None)


OUTSIDE = "its processes were asked to end by a signal from outside"
LEFT = "some ranks recorded that others went away, and no record says how those ended"
LOST = ("a node's torchrun", "SIGKILL")
UNSAID = "the launch ended without a word; see its logs"


KILLS = "and meanwhile the kernel of its hosts ended"
STARTER = "the process that started the ranks was killed by SIGKILL"
ENDED = "node 1: its torchrun ended with exit code 1"


@pytest.mark.parametrize(
    ("exits", "seen", "outcome", "reason"),
    [
        ([_exit(0, by="SIGABRT"), _exit(1, by="SIGKILL")], _seen(out_of_memory_kills=2),
         Outcome.OUT_OF_MEMORY, f"rank 1 was killed by SIGKILL, {KILLS} 2 processes because memory ran out"),
        ([_exit(1, by="SIGKILL")], _seen(out_of_memory_kills=0),
         Outcome.CRASHED, "rank 1 was killed by SIGKILL"),
        # Memory of the host ran out for another process: no evidence on these ranks.
        ([_exit(1, by="SIGSEGV")], _seen(out_of_memory_kills=1),
         Outcome.CRASHED, "rank 1 was killed by SIGSEGV"),
        ([_exit(1, code=3)], _seen(out_of_memory_kills=1), Outcome.CRASHED, "rank 1: exit code 3"),
        ([_exit(0, by="SIGTERM"), _exit(1, by="SIGTERM")], _seen(exit_code=1), Outcome.CANCELLED, OUTSIDE),
        ([], _seen(exit_code=1, asked_to_end=True), Outcome.CANCELLED, OUTSIDE),
        ([], _seen(exit_code=-15), Outcome.CANCELLED, OUTSIDE),
        ([], _seen(exit_code=-9, out_of_memory_kills=0), Outcome.MISSING_RANKS, STARTER),
        ([], _seen(exit_code=-9, out_of_memory_kills=1), Outcome.OUT_OF_MEMORY,
         f"{STARTER}, {KILLS} 1 process because memory ran out"),
        ([], _seen(exit_code=1, out_of_memory_kills=1), Outcome.UNKNOWN, UNSAID),
        # Rank 0 has written that the others went away, and its own exit tells no more.
        ([_exit(0, code=1)], _seen(exit_code=1, recorded=frozenset({0})), Outcome.MISSING_RANKS, LEFT),
        # Whoever waited for a node that left was ended by its own supervisor.
        ([_exit(0, by="SIGTERM")], _seen(exit_code=1, left="node 1: its pod was asked to end"),
         Outcome.MISSING_RANKS, "ranks are missing: node 1: its pod was asked to end"),
        # So that a node which noticed is not blamed: the one that went first may have said nothing.
        ([_exit(0, code=1)], _seen(exit_code=1, recorded=frozenset({0}), left=ENDED), Outcome.MISSING_RANKS,
         f"ranks are missing: {ENDED}"),
        # What ended this node's torchrun may be why the other left.
        ([], _seen(exit_code=-9, out_of_memory_kills=0, left=ENDED), Outcome.MISSING_RANKS, STARTER),
        # A rank that failed there tells more.
        ([_exit(1, code=3)], _seen(exit_code=1, left=ENDED), Outcome.CRASHED, "rank 1: exit code 3"),
        # The others fail because it is gone, however they do.
        ([_exit(0, code=1), _exit(2, by="SIGABRT")],
         _seen(exit_code=1, recorded=frozenset({0}), ended_early=frozenset({1})), Outcome.CRASHED,
         "rank 1 ended with exit code 0 before the run was over: the program must return, and not end its"
         " process (os._exit)"),
        # A rank that lost its peer is no culprit, unless it has recorded nothing or was itself killed.
        ([_exit(0, code=1)], _seen(exit_code=143, killed_on_a_node=LOST),
         Outcome.CRASHED, "rank 0: exit code 1"),
        ([_exit(0, code=1)], _seen(exit_code=143, killed_on_a_node=LOST, recorded=frozenset({0})),
         Outcome.MISSING_RANKS, "a node's torchrun was killed by SIGKILL"),
        ([_exit(0, by="SIGSEGV")], _seen(exit_code=143, killed_on_a_node=LOST, recorded=frozenset({0})),
         Outcome.CRASHED, "rank 0 was killed by SIGSEGV"),
        ([], _seen(exit_code=137, killed_on_a_node=("the agent of n2", "SIGKILL"), out_of_memory_kills=1),
         Outcome.OUT_OF_MEMORY,
         f"the agent of n2 was killed by SIGKILL, {KILLS} 1 process because memory ran out"),
        ([_exit(0, by="SIGTERM")], _seen(stopped=Ending(Outcome.HUNG, "silent")), Outcome.HUNG, "silent"),
        ([], _seen(), Outcome.UNKNOWN, UNSAID),
    ],
)  # fmt: skip
def test_an_end_is_read_from_what_was_seen_and_is_unknown_otherwise(exits, seen, outcome, reason) -> None:
    assert judged(replace(seen, exits=tuple(exits))) == (outcome, reason)


def test_a_launch_was_asked_to_end_if_all_of_its_torchruns_say_so(tmp_path) -> None:
    # The last line of what torchrun 2.13 prints after `kill`.
    words = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 714 got signal: 15\n"
    first, second = tmp_path / "agent-0.log", tmp_path / "agent-1.log"
    first.write_text(words)
    assert asked_to_end(tmp_path, nodes=1)
    # Once more is of a signal that came while torchrun waited for its ranks, after the first.
    first.write_text(words + words)
    second.write_text("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n")
    assert not asked_to_end(tmp_path, nodes=2)
    # Hosts number their processes each for itself.
    second.write_text(words)
    assert asked_to_end(tmp_path, nodes=2)
    second.write_text(words.replace("15", "11"))
    assert not asked_to_end(tmp_path, nodes=2)


def test_a_log_is_followed_line_by_whole_line(tmp_path) -> None:
    path, state = tmp_path / "rank-00000.jsonl", LaunchState()
    tail = LogTail(path)
    assert list(tail.events()) == []
    lines = '{"event": "ready"}\n{"event": "run", "run": "r1", "cell": "c1"}\n{"event": "mea'
    path.write_text(lines)
    for event in tail.events():
        state.take(event)
    assert (state.ready, state.started, state.cell_id, state.phase) == (True, ["r1"], "c1", "building")
    path.write_text(lines + 'sure"}\n{"event": "finished"}\n')
    for event in tail.events():
        state.take(event)
    assert state.phase == "measuring"
    assert LaunchState.of(path) == state


def test_a_log_of_any_length_is_followed_a_part_at_each_look(tmp_path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_text('{"event": "ready"}\n')
    with path.open("r+b") as file:
        # The file takes no room on the disk. No line of a log is that long.
        file.truncate(300 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"event": "proof"}\n{"event": "mea')
    looks = [next(iter(tail.events()), None) for tail in [LogTail(path)] * 7]
    assert looks == [{"event": "ready"}, None, None, None, None, {"event": "proof"}, None]
    state = LaunchState.of(path)
    assert (state.ready, state.phase) == (True, "proof")


def test_a_line_that_a_full_disk_cut_off_is_passed_over(tmp_path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_text('{"event": "ready"}\n{"event": "ru{"event": "finished"}\n{"event": "proof"}\n')
    assert [event["event"] for event in LogTail(path).events()] == ["ready", "proof"]


def test_a_nearly_full_disk_is_refused_before_anything_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "LEAST_FREE_BYTES", 2**60)
    with pytest.raises(MachineError, match="free some space or choose another disk with --out"):
        preflight.require_room(tmp_path / "not" / "there" / "yet")


def test_a_battery_a_slow_governor_and_a_busy_host_are_warned_of(monkeypatch) -> None:
    monkeypatch.setattr(preflight, "on_battery", lambda: True)
    monkeypatch.setattr(preflight, "slow_governor", lambda: "powersave")
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert preflight.warnings("cpu") == (
        "the machine runs on battery: its clocks may be held down",
        "the CPU frequency governor is powersave: clocks may be held down",
        "the machine was busy at the start: load 9.0 on 2 cores",
    )


def _gpu(index: int, **facts: object) -> device.Gpu:
    given = {
        "name": "NVIDIA H200",
        "uuid": f"GPU-{index}f00",
        "memory_bytes": 140 * 2**30,
        "used_bytes": 0,
        "processes": 0,
        "throttled": False,
        "ecc_errors": 0,
        "near_cores": (),
    }
    return device.Gpu(index=index, **{**given, **facts})


def test_ranks_near_one_numa_node_share_no_physical_core(monkeypatch, tmp_path) -> None:
    # Four cores with two threads each: 0 and 4, 1 and 5, and so on, as Linux counts them.
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(device, "CPUS", tmp_path)
    gpus = [_gpu(index, near_cores=tuple(range(8))) for index in range(2)]
    ranks = [Rank(rank=r, local_rank=r, node_rank=0, gpus=2, local_gpus=2) for r in range(2)]
    usable = [0, 1, 2, 3, 4, 5, 6, 7]
    assert [_near(gpus, rank, usable) for rank in ranks] == [(0, 4, 1, 5), (2, 6, 3, 7)]


def test_a_busy_a_hot_and_a_faulty_gpu_are_warned_of(monkeypatch) -> None:
    gpus = [
        _gpu(0),
        _gpu(1, processes=2, used_bytes=3 * 2**30),
        _gpu(2, throttled=True),
        _gpu(3, ecc_errors=4),
    ]
    monkeypatch.setattr(preflight, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(preflight, "lost_gpus", lambda: [device.LostGpu(index=4, why="GPU is lost")])
    assert preflight.warnings("cuda") == (
        "GPU 1 (NVIDIA H200) was in use at the start: 2 processes, 3.0 GiB taken",
        "GPU 2 (NVIDIA H200) was throttled at the start (heat or power)",
        "GPU 3 (NVIDIA H200) has 4 uncorrected ECC errors",
        "GPU 4 does not answer and is left out: GPU is lost",
    )


@pytest.fixture
def nvml(monkeypatch) -> dict[object, int]:
    """NVML as on a machine with three GPUs. Returns by handle which call fails, and with which error."""
    fails: dict[object, int] = {}
    memory = SimpleNamespace(total=80 * 2**30, used=0)
    answers = {"Init": None, "Shutdown": None, "DeviceGetCount": 3, "SystemGetDriverVersion": "580.95.05"}
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", lambda answer=answer: answer)

    def answering(call: str, answer: Callable[[object], object]) -> None:
        def asked(handle: object, *_: object) -> object:
            if (call, handle) in fails:
                raise pynvml.NVMLError(fails[call, handle])
            return answer(handle)

        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{call}", asked)

    def unknown(handle: object) -> object:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answering("HandleByIndex", lambda index: index)
    answering("HandleByUUID", lambda uuid: uuid)
    answering("MemoryInfo", lambda handle: memory)
    answering("Name", lambda handle: f"GPU of {handle}")
    answering("UUID", lambda handle: f"GPU-{handle}f00")
    for name in ("ComputeRunningProcesses", "CurrentClocksThrottleReasons", "TotalEccErrors", "CpuAffinity"):
        answering(name, unknown)
    return fails


@pytest.mark.parametrize("call", ["HandleByIndex", "MemoryInfo", "Name"])
def test_a_lost_gpu_is_left_out_and_ends_no_command(nvml, monkeypatch, call) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml[call, 1] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert [gpu.index for gpu in device.visible_gpus()] == [0, 2]
    assert [(gpu.index, gpu.why) for gpu in device.lost_gpus()] == [(1, "GPU is lost")]


# Slurm numbers a job's GPUs from 0, whichever of the node's they are, as CUDA does.
@pytest.mark.parametrize(
    ("visible", "denied"), [("0", []), (None, []), ("0,1", [0, 2]), ("GPU-1f00,GPU-2f00", [0, 2])]
)
def test_gpus_of_other_jobs_are_no_warning_and_do_not_count(nvml, monkeypatch, visible, denied) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for other in (0, 2):
        nvml["HandleByIndex", other] = pynvml.NVML_ERROR_NO_PERMISSION
    assert [(gpu.index, gpu.name) for gpu in device.visible_gpus()] == [(0, "GPU of 1")]
    told = [re.findall("/dev/nvidia([02])", warning) for warning in preflight.warnings("cuda")]
    assert [int(index) for found in told for index in found] == denied


def test_a_part_of_a_gpu_that_mig_makes_is_a_device(nvml, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    [gpu] = device.visible_gpus()
    assert (gpu.name, gpu.memory_bytes) == ("GPU of MIG-1234", 80 * 2**30)
    nvml["HandleByUUID", "MIG-1234"] = pynvml.NVML_ERROR_NOT_FOUND
    [gpu] = device.visible_gpus()
    assert (gpu.name, gpu.memory_bytes) == ("MIG device", None)
    assert Machine.here().devices("cuda") == 1


@pytest.mark.parametrize(
    ("name", "uuid"),
    [("NVIDIA H100 80GB HBM3", "GPU-1234"), ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG-1234")],
)
def test_nvml_is_asked_for_a_gpu_or_a_part_of_one(monkeypatch, name, uuid) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=name, uuid="1234")
    )
    assert device_uuid(torch.device("cuda", 0)) == uuid


def test_xid_and_ecc_errors_of_a_run_are_told_once(nvml, monkeypatch) -> None:
    xid, clock = pynvml.nvmlEventTypeXidCriticalError, pynvml.nvmlEventTypeClock
    events = [(clock, 5), (xid, 79), (xid, 79), (xid, 999)]
    errors = [2]

    def waited(events_of: object, timeout_ms: int) -> object:
        if not events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        kind, data = events.pop(0)
        return SimpleNamespace(eventType=kind, eventData=data)

    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", lambda: "events")
    monkeypatch.setattr(pynvml, "nvmlEventSetFree", lambda _: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceRegisterEvents", lambda *_: None)
    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", waited)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEccErrors", lambda *_: errors[-1])
    with device.gpu_faults("GPU-0") as faults:
        assert faults is not None
        errors.append(5)
        assert faults.take() == [
            "the GPU reported Xid 79 during the run: the GPU has fallen off the bus",
            "the GPU reported Xid 999 during the run: see the catalogue of Xid errors",
            "the GPU had 3 uncorrected ECC errors during the run",
        ]
        assert faults.take() == []
    nvml["HandleByUUID", "GPU-0"] = pynvml.NVML_ERROR_NOT_FOUND
    with device.gpu_faults("GPU-0") as faults:
        assert faults is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"cuda": None}, "torch 2.13.0 is built without CUDA, and this machine has 2 GPUs: install a build"),
        (
            {"cuda": "13.0", "error": "The NVIDIA driver on your system is too old"},
            "driver on your system is",
        ),
        ({"cuda": "13.0", "devices": 1}, "torch 2.13.0 sees 1 GPU, and NVML 2"),
        ({"cuda": "13.0", "devices": 2}, None),
    ],
)
def test_torch_itself_is_asked_for_the_gpus(monkeypatch, answer, said) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: [_gpu(0), _gpu(1)])
    found = TorchDevices(**{"torch": "2.13.0", "devices": 0, **answer})
    monkeypatch.setattr(preflight, "ask_torch", lambda: found)
    preflight.require_devices("cpu")
    if said is None:
        preflight.require_devices("cuda")
        return
    with pytest.raises(MachineError, match=re.escape(said)):
        preflight.require_devices("cuda")


def test_amd_gpus_are_refused_before_anything_asks_nvml(tmp_path, monkeypatch, capsys) -> None:
    """A host with two GPUs below AMD's driver, whose torch calls them cuda; node 0 is the CPU."""
    for node, gpu in enumerate(("0", "51234", "8421")):
        folder = tmp_path / "nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu}\n")
    assert amd_gpus(tmp_path / "nodes") == 2
    assert amd_gpus(tmp_path / "absent") == 0
    preflight.require_devices("cuda")
    monkeypatch.setattr(preflight, "amd_gpus", lambda: 2)
    preflight.require_devices("cpu")
    with pytest.raises(MachineError, match="2 AMD GPUs"):
        preflight.require_devices("cuda")
    call = ["matrix", "--workload", "mlp", "--gpus", "2", "--strategy", "ddp", "--dry-run"]
    assert cli.run([*call, "--device", "cuda", "--oversubscribe", "--backend", "gloo"]) == 1
    assert "2 AMD GPUs" in capsys.readouterr().err
    # Nothing was asked for: the study is on CPU, and says so.
    assert cli.run(call) == 0
    assert "2 AMD GPUs" in capsys.readouterr().err
    # CPU studies run here.
    assert cli.run(["doctor"]) == 0
    assert "no AMD GPU" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(preflight, "visible_gpus", lambda: [_gpu(0)])
    assert preflight.amd_only() is None


def test_torch_for_rocm_is_refused_on_the_rank_and_before(monkeypatch) -> None:
    monkeypatch.setattr(preflight, "torch_version", lambda: "2.13.0+rocm6.4")
    with pytest.raises(MachineError, match=re.escape("+rocm6.4 is built for AMD GPUs")):
        preflight.require_devices("cuda")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(MachineError, match="is built for AMD GPUs"):
        _device(a_launch(device="cuda"), Rank(rank=0, local_rank=0, node_rank=0, gpus=1, local_gpus=1))


@pytest.mark.slow
def test_torch_answers_in_a_process_of_its_own() -> None:
    found = ask_torch()
    assert found.torch.startswith("2.")
    assert (found.cuda is None) == (not found.devices and not found.error)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), ("GPU-1f", [1]), ("", []), ("0,9,1", [0]), ("-1", [])],
)
def test_cuda_visible_devices_is_read_as_the_runtime_does(visible, expected) -> None:
    chosen = device._selected([_gpu(0), _gpu(1), _gpu(2)], visible)
    assert [gpu.index for gpu in chosen] == expected


def significant(source: bytes) -> list[str]:
    """The tokens of a source by Python's own tokenizer, without comments and strings that are statements."""
    alone = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    return [
        token.string
        for token in tokenize.tokenize(io.BytesIO(source).readline)
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
        and not (token.type == tokenize.STRING and token.start in alone)
    ]


def test_the_code_hash_is_over_all_that_runs_and_no_comment_or_docstring() -> None:
    folder = checkout()
    for path in [*sorted((folder / "strategies").rglob("*.py")), folder / "harness/machine/code.py"]:
        parts = what_runs(source := path.read_bytes()).split(b"\0")
        code, strings = parts[: len(parts) // 2 + 1], parts[len(parts) // 2 + 1 :]
        joined = b"".join(chain.from_iterable(zip_longest(code, strings, fillvalue=b"")))
        found = [
            token.string
            for token in tokenize.tokenize(io.BytesIO(joined).readline)
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
        ]
        assert found == significant(source), path


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ('def f(x):\n    """Doc."""\n\n    # Why.\n    return g("#", x)  # what\n', True),
        ('"""Module."""\n\n\ndef f(x):\n    """Other\n\n    words."""  # why\n    return g("#", x)', True),
        ('def f(x):\n    return g("", x)\n', False),
        ('def f(x):\n    return g("#" "a", x)\n', False),
        ('def f(x):\n    return g(\n        "#",\n        x)\n', False),
        ('def f(x):\n  return g("#", x)\n', False),
    ],
)
def test_a_comment_or_a_docstring_makes_no_other_code(other, same) -> None:
    code = b'def f(x):\n    return g("#", x)\n'
    assert (what_runs(other.encode()) == what_runs(code)) is same


def test_the_tally_reopens_what_was_interrupted_and_keeps_closed_what_failed(tmp_path) -> None:
    def run(cell: str, outcome: Outcome, **figures: Any) -> RunResult:
        return a_result(cell_id=cell, outcome=outcome, ranks_present=0, **figures)

    results = [run("a", Outcome.OK), run("b", Outcome.CANCELLED), run("c", Outcome.OUT_OF_MEMORY)]
    conditions = Conditions(code_hash="0")
    study = Study(tmp_path)
    so_far = study_tally(study, EMPTY_PLAN, results, conditions, RunOptions())
    assert (so_far.ok_runs, so_far.closed) == ({"a": 1}, {"c": "out_of_memory"})
    assert study_tally(study, EMPTY_PLAN, results, conditions, RunOptions(rerun_failed=True)).closed == {}
    # What runs took is for estimates: the last step time, and the longest of each part.
    took = [
        run(
            "a",
            Outcome.OK,
            step_ns=Metric(value=step_ns, unit="ns", low=None, high=None, samples=1, interval=None),
            spent_ns=spent,
        )
        for step_ns, spent in ((9.0, {"build": 5 * 10**9, "proof": 10**9}), (8.0, {"build": 3 * 10**9}))
    ]
    known = study_tally(study, EMPTY_PLAN, took, conditions, RunOptions()).earlier
    assert known == {"a": Earlier(step_ns=8.0, spent_s={"build": 5.0, "proof": 1.0})}


class _Line:
    def __init__(self) -> None:
        self.shown: list[Standing] = []

    def show(self, standing: Standing) -> None:
        self.shown.append(standing)


def test_progress_says_how_long_it_runs_what_it_does_and_what_it_waits_for(tmp_path) -> None:
    shown: list[Standing] = []
    line = SimpleNamespace(show=shown.append)
    now, launch = [0.0], launch_time(0.0, ("c-1", {"measure": 100.0}))
    pace = Pace(line, [launch], names={"c-1": "mlp, ddp on 2, batch 8"}, clock=lambda: now[0])
    pulse = Pulse(tmp_path, Placement(nodes=3, gpus_per_node=1), clock=lambda: now[0])
    state = LaunchState(waits_for=pulse.waits_for())
    now[0] = 7.2
    pace.report(state)
    for node in (0, 2):
        torchrun_folder(tmp_path, node).mkdir(parents=True)
    state.waits_for = pulse.waits_for()
    pace.report(state)
    for rank in range(3):
        rank_log_path(tmp_path, rank).write_text("{}\n")
    pulse.silence_s()
    state.cell_id, state.phase = "c-1", "measuring"
    now[0] = 60.0
    rank_log_path(tmp_path, 0).write_text("{}\n{}\n")
    pulse.silence_s()
    state.waits_for = pulse.waits_for()
    pace.report(state)
    assert [(one.elapsed, one.told) for one in shown] == [
        ("7 s", "starting workers, waits for all 3 ranks to start"),
        ("7 s", "starting workers, waits for node 1 of 3 to start"),
        ("60 s", "mlp, ddp on 2, batch 8: measuring, waits for ranks 1 and 2, silent for 52.8 s"),
    ]


def launch_time(startup_s: float, *runs: tuple[str, Mapping[str, float]]) -> LaunchTime:
    return LaunchTime(0.0, startup_s, runs)


def test_time_left_is_learned_from_each_part_that_has_ended() -> None:
    now, first, later = [0.0], {"proof": 6.0, "measure": 10.0}, {"first steps": 1.0, "measure": 10.0}
    launches = [
        launch_time(8.0, ("a", first), ("b", first)),
        launch_time(8.0, ("b", later), ("a", later)),
        launch_time(8.0, ("a", later)),
    ]
    pace = Pace(_Line(), launches, clock=lambda: now[0])
    state = LaunchState()

    def left(at: float, event: str, **told: str) -> float:
        now[0] = at
        state.take({"event": event, **told})
        pace.report(state)
        return pace.left_s()

    # Three starts of 8 s, two first runs of 16 s and three later ones of 11 s; then 3 s less, and no start.
    assert left(3, "ready") == 24 + 32 + 33 - 3
    # A start took 4 s: so will the others.
    assert left(4, "run", run="1", cell="a") == 8 + 32 + 33
    left(5, "proof")
    # It took twice as long as estimated: with the estimate as a second opinion, all takes 1.5 times as long.
    assert left(17, "measure") == 8 + 15 + 1.5 * (16 + 33)
    # So did the measurement: "a" has its own time, 20 s, and first steps are twice as long as estimated.
    assert left(37, "hash") == 8 + (9 + 15) + (2 + 15) + 2 * (2 + 20)
    # The run "b" fails in its proof, of which nothing is learned, and none of its runs will come.
    left(37, "run", run="2", cell="b")
    left(38, "proof")
    now[0] = 40.0
    pace.done([_measured("a")] * 2, {"b"})
    pace.launch_over()
    state = LaunchState()
    assert left(41, "ready") == 4 - 3 + 22 + 4 + 22


PARTS = ("build", "proof", "warm-up", "measure", "hash", "late proof", "exposed", "recording")
ESTIMATED = {
    "resnet single": (1.1, 0.8, 2.3, 2.0, 0.1, 0.9),
    "gpt single": (1.0, 0.2, 1.2, 2.0, 0.1, 0.4),
    "gpt ddp": (1.0, 0.3, 1.3, 0.8, 0.1, 0.4, 1.6, 0.7),
    "resnet ddp": (1.1, 1.2, 3.2, 1.9, 0.1, 1.2, 4.1, 1.7),
}
RECORDED = """
11.1; resnet single: 0.3 4.9 4.7 5.6 0.1 4.5; gpt single: 0.0 0.7 1.0 2.3 0.0 0.4
11.2; gpt ddp: 0.1 1.3 0.8 2.9 0.0 1.9 6.9 3.5; resnet ddp: 0.6 5.7 3.0 9.6 0.2 5.2 19.5 11.0
16.0; resnet ddp: 0.5 1.7 4.4 10.0 0.2 6.5 19.8 9.3; gpt ddp: 0.1 0.6 3.4 4.5 0.0 3.0 8.4 3.9
16.0; gpt single: 0.0 0.2 3.7 3.7 0.0 1.2; resnet single: 0.5 1.6 9.4 5.1 0.2 3.0
13.1; gpt single: 0.1 0.3 0.8 2.8 0.0 1.0; resnet single: 0.3 0.9 2.9 7.2 0.2 3.2
16.7; resnet ddp: 1.0 2.5 4.1 14.1 0.2 6.4 22.9 7.8; gpt ddp: 0.1 0.6 2.3 4.4 0.0 2.2 5.5 2.8
"""
"""`make demo` on two cores that others loaded: the seconds to the first run of each launch, and of the parts
of each run. From the third launch on the second part is of first steps."""


@pytest.mark.parametrize("speed", [0.5, 1, 4])
def test_time_left_is_right_within_a_quarter_after_a_third_of_the_runs(speed) -> None:
    """On a machine on which everything takes as long, half of it, or four times less."""

    def parts(launch: int, seconds: Iterable[float]) -> dict[str, float]:
        named = dict(zip(PARTS, seconds, strict=False))
        return named if launch < 2 else {"first steps": named.pop("proof"), **named}

    recorded = [
        (
            float(start_s),
            [(cell, map(float, took.split())) for cell, took in (run.split(": ") for run in runs)],
        )
        for start_s, *runs in (line.split("; ") for line in RECORDED.split("\n")[1:-1])
    ]
    now = [0.0]
    launches = [
        launch_time(8.0, *((cell, parts(at, ESTIMATED[cell])) for cell, _ in runs))
        for at, (_, runs) in enumerate(recorded)
    ]
    pace, told = Pace(_Line(), launches, clock=lambda: now[0]), []
    for at, (start_s, runs) in enumerate(recorded):
        state, now[0] = LaunchState(), now[0] + start_s / speed
        for cell, seconds in runs:
            state.take({"event": "run", "cell": cell})
            for part, took_s in parts(at, seconds).items():
                state.take({"event": part})
                pace.report(state)
                now[0] += took_s / speed
                told += [(now[0], pace.left_s())] if at > 1 else []
            state.take({"event": "recorded"})
            pace.report(state)
        pace.done([_measured("a")] * len(runs), {})
        pace.launch_over()
    # The last tenth, less than the start of a launch, is not worth a figure.
    off = [left / (now[0] - then) - 1 for then, left in told if now[0] - then > 0.1 * now[0]]
    assert max(map(abs, off)) <= 0.25, off


def test_time_left_is_never_more_than_the_user_gave_and_a_deadline_only_comes_nearer() -> None:
    now = [0.0]
    deadline = Deadline(None, "none", clock=lambda: now[0])
    pace = Pace(_Line(), [launch_time(100.0, ("a", {}))], deadline=deadline, clock=lambda: now[0])
    assert (deadline.left_s, deadline.is_over, pace.left_s()) == (None, False, 100)
    deadline.bring_forward(20, "the job's time limit")
    now[0] = 5.0
    deadline.bring_forward(60, "later")
    assert (pace.left_s(), deadline.left_s, deadline.reason) == (15, 15, "the job's time limit")
    deadline.bring_forward(1, "sooner")
    now[0] = 6.5
    assert (pace.left_s(), deadline.is_over, deadline.reason) == (0, True, "sooner")


def test_runs_of_other_code_do_not_count_nor_under_other_conditions_that_are_known() -> None:
    code, result = code_version(), _measured(code_hash="c")
    for conditions in (Conditions.here(code), Conditions.elsewhere(code)):
        assert conditions.changes(_measured(code_hash="other"), virtual=False)
        assert not conditions.changes(_measured(code_hash=code.code_hash), virtual=False)
    assert not Conditions(code_hash="c").changes(result, virtual=False)
    then = result.environment.torch
    assert Conditions(code_hash="d", torch="0.1", nccl_settings={"NCCL_ALGO": "Tree"}).changes(
        result, virtual=False
    ) == [
        "code of bench c then, d now",
        f"torch {then} then, 0.1 now",
        "NCCL settings none then, NCCL_ALGO=Tree now",
    ]


def test_variables_that_change_a_step_are_a_condition_and_what_torchrun_sets_is_not(monkeypatch) -> None:
    before = nccl_settings()
    given = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_ALGO": "Tree",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_DIST_USE_NCCL2": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    ignored = {
        "NCCL_API_TOKEN": "secret",
        "CUDA_VISIBLE_DEVICES": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    for name, value in (given | ignored).items():
        monkeypatch.setenv(name, value)
    assert nccl_settings() == before | given
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert nccl_settings() == before | given | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def test_variables_of_other_libraries_that_change_a_step_are_a_condition_too(monkeypatch) -> None:
    before = other_settings()
    names = (
        "ATEN_CPU_CAPABILITY",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "FI_PROVIDER",
        "OMP_PROC_BIND",
        "UCX_TLS",
    )
    given = dict.fromkeys((*names, "TORCH_DISTRIBUTED_DEBUG"), "x")
    ignored = "CUDA_MPS_PIPE_DIRECTORY", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", "UCX_API_TOKEN"
    for name in (*given, *ignored):
        monkeypatch.setenv(name, "x")
    assert other_settings() == before | given
    result = _measured(code_hash="c")
    assert result.environment is not None
    now = Conditions(code_hash="c", settings={"FI_PROVIDER": "efa"})
    # Of an older run nothing is known.
    assert not now.changes(result, virtual=False)
    then = msgspec.structs.replace(result.environment, settings={})
    changed = now.changes(msgspec.structs.replace(result, environment=then), virtual=False)
    assert changed == ["other settings none then, FI_PROVIDER=efa now"]


@pytest.mark.parametrize(("value", "warned"), [("1", True), ("0", False), ("", False)])
def test_kernels_that_are_waited_for_are_warned_of(value, warned, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    assert any("CUDA_LAUNCH_BLOCKING" in told for told in preflight.warnings("cuda")) == warned


V1 = "3:cpu,cpuacct:/jobs/one/step\n9:memory:/jobs/one\n"
HALF, TWO = "50000\n", "200000\n"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        # The job's limit holds for its step.
        ("0::/jobs/one\n", {"jobs/one/cpu.max": "max 100000\n", "jobs/cpu.max": "300000 100000\n"}, 3.0),
        # In a container the own group is the root.
        ("0::/outside\n", {"cpu.max": "200000 100000\n"}, 2.0),
        (V1, {"cpu/jobs/one/step/cpu.cfs_quota_us": TWO, "cpu/jobs/one/cpu.cfs_quota_us": HALF}, 0.5),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": TWO}, 2.0),
        (V1, {"cpu/jobs/one/step/cpu.cfs_quota_us": "-1\n"}, None),
    ],
)
def test_the_quota_of_cpus_is_that_of_the_control_groups_whichever_their_version(
    tmp_path, groups, files, quota
) -> None:
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"groups/{name}": files[name] for name in files},
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith("cpu.cfs_quota_us"):
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    assert device.cgroup_quota(proc=tmp_path / "proc", cgroups=tmp_path / "groups") == quota


def test_what_keeps_nccl_from_rdma_devices_is_told(tmp_path) -> None:
    for name, state in {"mlx5_0": "4: ACTIVE", "mlx5_1": "1: DOWN"}.items():
        (tmp_path / name / "ports/1").mkdir(parents=True)
        (tmp_path / name / "ports/1/state").write_text(f"{state}\n")
    (tmp_path / "status").write_text("Name:\tbench\nCapEff:\t0000000000000000\n")
    assert device.rdma_devices(tmp_path) == ["mlx5_0"]
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**16, hard))
    try:
        # The C library loads everywhere, in the place of one that is installed.
        missing, locked = device.rdma_warnings(["mlx5_0"], "libno-such.so.1", tmp_path / "status")
        assert device.rdma_warnings(["mlx5_0"], "libc.so.6", tmp_path / "status") == [locked]
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert "libno-such.so.1" in missing
    assert "0.0625 MiB" in locked


def test_a_dry_run_counts_the_runs_that_a_change_costs() -> None:
    cell = a_cell(strategy="single", gpus=1)
    plan = msgspec.structs.replace(EMPTY_PLAN, cells=(cell,))
    ours = msgspec.structs.replace(_measured(code_hash="c"), cell_id=cell.id)
    failed = msgspec.structs.replace(ours, outcome=Outcome.CRASHED)
    results = [ours, ours, failed, _measured(code_hash="c")]
    assert uncounted(results, plan, Conditions(code_hash="c")) == []
    assert uncounted(results, plan, Conditions(code_hash="d")) == [
        "2 runs of these cells do not count: code of bench c then, d now"
    ]


def test_emulated_runs_do_not_count_where_the_ranks_have_cores_of_their_own() -> None:
    code = code_version()
    emulated = msgspec.structs.replace(_measured(code_hash=code.code_hash), evidence=Evidence.EMULATED)
    assert emulated.environment is not None
    four = msgspec.structs.replace(emulated.environment, gpus_per_node=4)
    emulated = msgspec.structs.replace(emulated, environment=four)
    assert not Conditions(code_hash=code.code_hash, cores=2).changes(emulated, virtual=False)
    assert Conditions(code_hash=code.code_hash, cores=4).changes(emulated, virtual=False)
    # Ranks that share a GPU do so whatever cores there are.
    one_gpu = msgspec.structs.replace(
        emulated, environment=msgspec.structs.replace(four, device_uuid="GPU-1")
    )
    assert not Conditions(code_hash=code.code_hash, cores=4).changes(one_gpu, virtual=False)
    # On virtual nodes the next run would be emulated as well.
    assert not Conditions(code_hash=code.code_hash, cores=4).changes(emulated, virtual=True)


def test_the_version_of_torch_is_the_one_that_ranks_record(tmp_path, monkeypatch) -> None:
    assert torch_version() == torch.__version__
    # A CUDA build from PyPI, whose metadata say 2.15.0.
    (tmp_path / "version.py").write_text("debug = False\n__version__ = '2.15.0+cu132'\n")
    built = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: built)
    assert torch_version() == "2.15.0+cu132"


def _measured(code_hash: str) -> RunResult:
    environment = an_environment(
        python=platform.python_version(), torch=torch_version() or "", code=CodeVersion(code_hash=code_hash)
    )
    return a_result(environment=environment)
