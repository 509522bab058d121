"""One of the two replicas that the drills of docs/studies/drills.py train under torchft; they start it.

    python docs/studies/torchft_replica.py REPLICA LOG

trains the model of the other drills on the same data, in a process that torchft's manager coordinates with
the other replica's, by the lighthouse at TORCHFT_LIGHTHOUSE. LOG becomes a training log of bench: a row for
each committed step, and a `Started` when the number of replicas has changed.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo

from harness.features.train.log import Started, Steps, TrainingLogWriter
from harness.features.train.order import TrainOrder
from results.store import utc_now
from strategies.optimizers import build_optimizer
from workloads.build import build_workload
from workloads.catalog import MEMBERS
from workloads.data import DataRequest
from workloads.training_data import open_training

ORDER = TrainOrder(steps=100_000)
BATCH = 32
COLLECTIVE_TIMEOUT = timedelta(seconds=5)
"""torchft's own examples have this value."""


def main() -> None:
    name, log = sys.argv[1:]
    torch.manual_seed(0)
    workload = build_workload("mlp")
    assert workload.loss is not None
    optimizer = build_optimizer(MEMBERS["mlp"].optimizer, workload.module.parameters())
    data = open_training(
        DataRequest(
            workload=workload,
            dataset="digits",
            micro_batch=BATCH,
            replica=int(name),
            replicas=2,
            seed=0,
            device=torch.device("cpu"),
        )
    )

    def state() -> dict[str, object]:
        return {"model": workload.module.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        workload.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE_TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        # A step begins when its quorum is known, so that the log has the time of each quorum.
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=name,
    )
    committed = Optimizer(manager, optimizer)
    rows = TrainingLogWriter(Path(log))
    replicas = 0
    while True:
        began = time.perf_counter()
        committed.zero_grad()
        step = manager.current_step()
        if manager.num_participants() != replicas:
            replicas = manager.num_participants()
            rows.write(
                Started(
                    at=utc_now(),
                    run_id=name,
                    launch_id=name,
                    gpus=replicas,
                    replicas=replicas,
                    resumed_step=step,
                    order=ORDER,
                    total_steps=100_000,
                )
            )
            began = time.perf_counter()
        inputs, targets = next(data)
        loss = workload.loss(workload.module(inputs), targets)
        loss.backward()
        # Not by torchft's DistributedDataParallel: in 0.2.0, with torch 2.13, its hook fails an assertion
        # when the other replica is killed, and this one ends as well.
        for parameter in workload.module.parameters():
            manager.allreduce(parameter.grad).wait()
        committed.step()
        if manager.current_step() > step:
            rows.write(
                Steps(
                    at=utc_now(),
                    step=manager.current_step(),
                    epoch=0.0,
                    samples=BATCH * manager.batches_committed(),
                    loss=loss.item(),
                    seconds=time.perf_counter() - began,
                    learning_rate=optimizer.param_groups[0]["lr"],
                )
            )


if __name__ == "__main__":
    main()
