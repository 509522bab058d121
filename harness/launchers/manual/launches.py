"""Launches that a person starts by hand, on one host or on several that share the study's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.launch.campaign import Campaign, CampaignContext, LaunchMaker
from harness.launch.command import Rendezvous, shell_line, torchrun_command
from harness.launch.machine import Machine
from harness.launch.starter import LocalStarter
from harness.launch.tally import Conditions, Tally
from harness.machine.code import checkout
from harness.plan.schedule import PlannedLaunch
from harness.terminal.console import Console
from results.environment import CodeVersion
from results.errors import bench_call
from results.job import RunOptions
from results.launch import Launch
from results.outcome import Evidence
from results.plan import Plan
from results.store import Study


def write_launches(
    study: Study, plan: Plan, options: RunOptions, code: CodeVersion, console: Console
) -> None:
    """Write a launch file for everything that is left of the plan, and print how to start each.

    On every host of a launch the same line is run with that host's NODE_RANK (0, 1, ...), and HOST:PORT
    the address of the host whose NODE_RANK is 0. A launch that was written before and not started is
    printed again.
    """
    campaign = Campaign(study, plan, options, console)
    so_far = campaign.tally(study.collect(), Conditions.here(code))
    maker = LaunchMaker(
        plan,
        options,
        Machine.here(),
        CampaignContext(starter=LocalStarter(), checkout=checkout(), code=code),
    )
    waiting = [launch for launch in study.launches() if _waits(study, launch, code, options)]
    for planned in campaign.planned(so_far):
        launch = _written_before(planned, waiting) or _new(study, planned, maker, so_far)
        path = study.launch_folder(launch.launch_id).resolve() / "launch.json"
        console.result(f"# repeat {planned.repeat}, {planned.placement.gpus} workers")
        console.result(typed_line(launch, path))
    console.note(
        f"run each line on every host of its launch, NODE_RANK 0, 1, ... and HOST:PORT that of node 0, in "
        f"the environment where bench is installed; then: {bench_call('report', study.root)}"
    )


def typed_line(launch: Launch, path: Path) -> str:
    """What is typed on every host, with words in place of the host's number and of node 0's address."""
    rendezvous = Rendezvous(node_rank="NODE_RANK", endpoint="HOST:PORT")
    return shell_line(launch, torchrun_command(launch, path, rendezvous=rendezvous, python="python"))


def _waits(study: Study, launch: Launch, code: CodeVersion, options: RunOptions) -> bool:
    kept, asked = (launch.trace, launch.tensorboard), (options.trace, options.tensorboard)
    return (
        launch.supervisor_pid is None
        and (launch.code.code_hash, launch.code.packages) == (code.code_hash, code.packages)
        and kept == asked
        and not study.begun_slots(launch)
    )


def _written_before(planned: PlannedLaunch, waiting: Sequence[Launch]) -> Launch | None:
    wanted = [(cell.id, planned.repeat) for cell in planned.cells]
    for launch in waiting:
        same = [(slot.cell_id, slot.repeat) for slot in launch.slots] == wanted
        if same and launch.placement == planned.placement:
            return launch
    return None


def _new(study: Study, planned: PlannedLaunch, maker: LaunchMaker, so_far: Tally) -> Launch:
    launch = msgspec.structs.replace(
        maker.launch(planned, planned.cells, so_far),
        # Which hosts will run it is not known here, nor watched.
        evidence=Evidence.EMULATED if planned.virtual else Evidence.MEASURED,
        pin=True,
        supervisor_pid=None,
    )
    study.add_launch(launch)
    return launch
