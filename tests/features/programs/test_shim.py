"""The file that runs a foreign program: when its steps end, how it ends, and how long its ranks wait."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import pytest

SHIM = Path(__file__).resolve().parents[3] / "harness/features/programs/worker/shim.py"
ORIGIN = """
import gc, json, os, runpy, sys
import torch, torch._dynamo
gc.freeze()
for line in sys.stdin:
    call = json.loads(line)
    if os.fork() == 0:
        os.chdir(call["folder"])
        printed = os.open("printed", os.O_WRONLY | os.O_CREAT)
        os.dup2(printed, 1), os.dup2(printed, 2)
        sys.argv, sys.path[0] = [call["shim"], "control.json"], os.path.dirname(call["shim"])
        runpy.run_path(call["shim"], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""Forks a process for each line, which runs the shim: torch is imported only once."""
MODEL = """
import torch
weight = torch.nn.Parameter(torch.zeros(4))
weight.grad = torch.ones(4)
optimizer = torch.optim.SGD([weight], lr=0.1)
"""


class Told:
    """Lines that the shim has written for one program."""

    def __init__(self, folder: Path, code: int) -> None:
        self.code, self.printed = code, (folder / "printed").read_text()
        self.lines = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
        (self.end,) = self.all("end")

    def all(self, name: str) -> list[Any]:
        return [line[name] for line in self.lines if name in line]

    def column(self, name: str) -> list[Any]:
        return [value for steps in self.all("steps") for value in steps[name]]


def _write(folder: Path, text: str, **control: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    places = {"script": str(folder / "train.py"), "out": str(folder / "out"), "stop": str(folder / "stop")}
    words = {"module": None, "arguments": [], "steps": "optimizer", "flush_s": 0.0}
    (folder / "control.json").write_text(json.dumps(words | places | control))


@pytest.fixture(scope="module")
def origin() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ORIGIN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(origin, tmp_path) -> Callable[..., Told]:
    """Runs a script until it has ended."""

    def run(script: str, **control: object) -> Told:
        _write(tmp_path, script, **control)
        (tmp_path / "out").unlink(missing_ok=True)
        print(json.dumps({"folder": str(tmp_path), "shim": str(SHIM)}), file=origin.stdin, flush=True)
        return Told(tmp_path, int(origin.stdout.readline()))

    return run


def test_each_step_of_the_first_optimizer_is_written_with_its_end(run):
    told = run(MODEL + "for _ in range(3): optimizer.step()")
    ends = told.column("end_ns")
    assert told.code == 0
    assert ends == sorted(ends)
    assert len(ends) == 3
    assert told.column("wait_ns") == told.column("loss") == told.column("samples") == [None, None, None]
    assert (told.end["steps"], told.end["exit"], told.end["peak_device_bytes"]) == (3, "returned", None)
    assert told.end["peak_rss_bytes"] >= told.all("begin")[0]["rss_bytes"] > 0
    assert "no collective" in told.all("waits")[-1]["note"]


def test_the_program_leaves_after_the_step_in_the_stop_file_even_if_it_catches_all(run, tmp_path):
    (tmp_path / "stop").write_text("4")
    breaks = "while True:\n  try:\n    while True: optimizer.step()\n  finally: break"
    passes = "for _ in range(9):\n  try: optimizer.step()\n  except BaseException: pass\nexit(7)"
    for loop in (breaks, passes):
        told = run(MODEL + loop)
        assert (told.code, told.end["steps"], told.end["exit"]) == (0, 5, "stop")
        assert len(told.column("end_ns")) == 5


def test_a_program_that_fails_has_the_traceback_and_exit_code_of_python(run):
    told = run(MODEL + "optimizer.step()\nraise ValueError('no more\\nbatches')")
    assert (told.code, told.end["exit"], told.end["error"]) == (1, "raised", "ValueError: no more")
    assert "raise ValueError" in told.printed
    assert run("exit(5)").code == 5


def test_a_step_that_a_scaler_leaves_out_counts(run):
    loop = """
for value in (1.0, float("inf"), 1.0):
    weight.grad = scaler.scale(weight.sum()).new_full((4,), value)
    scaler.step(optimizer), scaler.update()
"""
    for enabled in (True, False):
        scaler = f"scaler = torch.amp.GradScaler('cpu', enabled={enabled})"
        assert run(MODEL + scaler + loop).end["steps"] == 3


@pytest.mark.parametrize("steps", ["optimizer", "bench_step"])
def test_from_its_first_call_on_bench_step_alone_ends_steps(run, steps):
    script = MODEL + "for k in range(3):\n  optimizer.step()\n  bench_step(torch.tensor(k / 2), samples=8)\n"
    told = run(script + "bench_step(); bench_step(float('nan'))", steps=steps)
    before = [None] if steps == "optimizer" else []
    assert told.column("samples") == [*before, 8, 8, 8, None, None]
    assert told.column("loss")[:-1] == [*before, 0, 0.5, 1, None]
    assert isnan(told.column("loss")[-1])
    assert run(script, steps="none").end["steps"] == 0


def test_a_further_optimizer_is_noted_and_not_counted(run):
    told = run(
        MODEL + "other = torch.optim.AdamW([weight])\nfor _ in range(3): optimizer.step(); other.step()"
    )
    assert [("AdamW" in note) for (note,) in told.all("notes")] == [True]
    assert told.end["steps"] == 3


def test_an_optimizer_that_steps_others_counts_once(run):
    container = """
class Container(torch.optim.Optimizer):
    def step(self, closure=None): optimizer.step(), other.step()
other = torch.optim.AdamW([weight])
both = Container([weight], {})
for _ in range(3): both.step()
"""
    told = run(MODEL + container)
    assert (told.end["steps"], told.all("notes")) == (3, [])


@pytest.mark.slow
@pytest.mark.parametrize("step", ["torch.compile(optimizer.step, backend=graphs)", "whole", "exchange"])
def test_compiled_code_is_one_graph_as_without_the_shim(run, step):
    told = run(
        f"""{MODEL}
from torch._dynamo.testing import CompileCounter
graphs = CompileCounter()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
@torch.compile(backend=graphs)
def whole(): optimizer.step()
@torch.compile(backend=graphs, fullgraph=True)
def exchange(value=torch.ones(2)): torch.distributed.all_reduce(value)
step = {step}
for _ in range(4): step()
assert graphs.frame_count == 1, graphs.frame_count
"""
    )
    assert (told.code, told.end["steps"]) == (0, 0 if step == "exchange" else 4), told.printed


STARTS = {
    "launcher": "import subprocess; subprocess.run('exec torchrun train.py', shell=True)",
    "module": "import os, sys; os.system(sys.executable + ' -m torch.distributed.run train.py')",
    "spawn": "import torch; torch.multiprocessing.spawn(print, nprocs=2)",
    "variable": "import os, subprocess; subprocess.run(['true'], env={**os.environ, 'LOCAL_RANK': '7'})",
    "engine": MODEL
    + "names = {'__name__': 'deepspeed.runtime.zero.stage3', 'optimizer': optimizer}\n"
    + "exec('def step(): optimizer.step()', names)\nnames['step']()",
}


@pytest.mark.parametrize("start", STARTS)
def test_ranks_of_its_own_and_an_engine_that_steps_by_groups_are_refused(run, start):
    told = run(STARTS[start])
    assert told.code == 3
    assert ("bench_step" if start == "engine" else "without its launcher") in told.all("refused")[0]


def test_processes_that_the_program_forks_write_nothing_and_its_own_last_steps_are_written_at_its_end(run):
    script = """
import os
optimizer.step()
if os.fork() == 0:
    optimizer.step()
    raise SystemExit
os.wait()
for _ in torch.utils.data.DataLoader(range(4), num_workers=2): optimizer.step()
"""
    told = run(MODEL + script, flush_s=1e6)
    assert [len(steps["end_ns"]) for steps in told.all("steps")] == [5]


RANKS = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
net[1].register_full_backward_hook(lambda *_: time.sleep(0.03 * dist.get_rank()))
if sys.argv[1] == "ddp":
    net = torch.nn.parallel.DistributedDataParallel(net)
elif sys.argv[1] == "fully_shard":
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for part in (net[0], net[2], net): torch.distributed.fsdp.fully_shard(part, mesh=mesh)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
while True:
    net(torch.randn(8, 64)).sum().backward()
    if sys.argv[1] == "asynchronous":
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in net.parameters()]
        for work in works: work.wait()
    optimizer.step()
    optimizer.zero_grad()
"""
"""The second rank sleeps for 30 ms in each of its backward passes."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fully_shard", "asynchronous"])
def test_a_rank_that_is_slow_in_its_backward_waits_less_than_the_other(tmp_path, way):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    processes = []
    for rank in ("0", "1"):
        _write(tmp_path / rank, RANKS, arguments=[way], flush_s=0.05)
        (tmp_path / rank / "stop").write_text("29")
        command = [sys.executable, str(SHIM), str(tmp_path / rank / "control.json")]
        with (tmp_path / rank / "printed").open("w") as printed:
            where = {**os.environ, **group, "RANK": rank, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, env=where, stdout=printed, stderr=printed))
    told = [Told(tmp_path / str(rank), process.wait()) for rank, process in enumerate(processes)]
    assert [(rank.code, rank.end["steps"]) for rank in told] == [(0, 30), (0, 30)], told[0].printed
    fast, slow = (rank.column("wait_ns")[5:] for rank in told)
    # Half of the 30 ms at least, for all else that differs between the ranks.
    assert median(a - b for a, b in zip(fast, slow, strict=True)) > 15e6
    assert told[0].all("waits")[-1] == {"by": "collectives", "note": None}


@pytest.mark.slow
def test_the_program_sees_what_python_would_show_it(tmp_path):
    """A script and a module, each by Python alone and by the shim."""
    show = "import sys, helper; print(sys.argv, sys.path[0], __name__, sys.modules['__main__'].x)"
    folder = tmp_path / "folder"
    _write(folder, "x = 1;" + show, arguments=["--a", "b c"])
    (folder / "helper.py").touch()
    (tmp_path / "helper.py").touch()
    (tmp_path / "shown.py").write_text("x = 2;" + show)

    def output(*words: object) -> str:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert output(SHIM, folder / "control.json") == output(folder / "train.py", "--a", "b c")
    _write(folder, show, script=None, module="shown", arguments=["x"])
    assert output(SHIM, folder / "control.json") == output("-m", "shown", "x")
