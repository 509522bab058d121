"""A training script that does one thing wrong, which its arguments name."""

import os
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
"""Read at import, as many scripts do."""
fault, batch = sys.argv[1], int(sys.argv[2])
if fault == "launches":
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__], check=True
    )
if fault == "catches":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if fault == "port taken" and RANK == 0:
    other = socket.create_server(("", int(os.environ["MASTER_PORT"])))
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step(number: int) -> None:
    model(torch.randn(batch, 8)).mean().backward()
    dist.all_reduce(model.weight.grad)
    if fault == "no steps":
        print(f"update {number}", flush=True)
        return
    optimizer.step()
    if fault == "uneven" and RANK == 1:
        optimizer.step()
    if fault == "batch changes":
        bench_step(samples=batch + number // 10)  # noqa: F821 - bench adds it
    if fault == "fails" and number == 12 and RANK == 1:
        raise ValueError("the data are damaged")
    if fault == "diverges":
        bench_step(loss=1.0 if number < 12 else float("nan"))  # noqa: F821 - bench adds it


number = 0
while number < (8 if fault in ("short", "no steps") else 10**9):
    try:
        step(number)
        time.sleep(0.005)
    except SystemExit:
        if fault != "catches":
            raise
    number += 1
dist.destroy_process_group()
