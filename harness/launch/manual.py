"""Launches that a person starts by hand, on one host or on several that share the study's folder."""

from __future__ import annotations

import shlex

import msgspec

from harness.console import Console
from harness.launch.campaign import build_launch, tally
from harness.launch.command import Rendezvous, torchrun_command
from harness.launch.machine import Machine
from harness.plan.schedule import Progress, schedule
from results.environment import CodeVersion
from results.launch import Slot
from results.outcome import Evidence
from results.plan import Plan
from results.store import Study, new_id


def write_launches(study: Study, plan: Plan, code: CodeVersion, console: Console) -> None:
    """Write a launch file for everything that is left of the plan, and print how to start each.

    On every host of a launch the same line is run with that host's NODE_RANK (0, 1, ...), and HOST:PORT
    the address of the host whose NODE_RANK is 0.
    """
    so_far = tally(study.collect(), code, rerun_failed=False)
    launches = schedule(
        plan.cells,
        repeats=plan.request.repeats,
        progress=Progress(ok_runs=so_far.ok_runs, closed=so_far.closed),
        seed=plan.request.seed,
        gpus_per_node=plan.request.gpus_per_node,
    )
    machine = Machine.here()
    for planned in launches:
        slots = tuple(Slot(cell_id=cell.id, run_id=new_id(), repeat=planned.repeat) for cell in planned.cells)
        launch = msgspec.structs.replace(
            build_launch(planned, slots, machine, code=code, source_folder=plan.request.source_folder),
            # Which hosts will run it is not known here, nor watched.
            evidence=Evidence.MEASURED,
            pin=True,
            supervisor_pid=None,
        )
        path = study.add_launch(launch).resolve()
        rendezvous = Rendezvous(node_rank="NODE_RANK", endpoint="HOST:PORT")
        command = torchrun_command(launch, path, rendezvous=rendezvous, python="python")
        console.result(f"# repeat {planned.repeat}, {planned.placement.gpus} workers")
        console.result(f"OMP_NUM_THREADS={launch.threads} PYTHONSAFEPATH=1 {shlex.join(command)}")
    console.note(
        f"run each line on every host of its launch, NODE_RANK 0, 1, ... and HOST:PORT that of node 0, in "
        f"the environment where bench is installed; then: bench report {study.root}"
    )
