"""The launcher `manual`: launches that a person starts by hand.

They are on one host, or on several that share the study's folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from harness.launch.campaign import CampaignContext, LaunchMaker
from harness.launch.command import shell_line, torchrun_command
from harness.launch.starter import LocalStarter
from harness.launch.tally import Conditions, study_tally
from harness.launchers.campaign_call import show_plan
from harness.launchers.launcher import Launcher, LauncherCall, MatrixCall, WorkerHosts
from harness.machine.code import checkout
from harness.plan.surroundings import Machine
from results.catalogue.gpus import require_known
from results.environment import CodeVersion
from results.errors import bench_call
from results.job import RunOptions
from results.launch import Launch
from results.outcome import Evidence
from results.plan import Plan
from results.store import Study
from results.strict_yaml import FileKind


class HostsProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of `--site`: the GPUs of the hosts, which this host may lack."""

    gpu_model: str
    """The GPU's name in bench's catalogue, such as H100-SXM5-80GB, to assume unmeasured step times from."""
    gpus_per_node: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        require_known(self.gpu_model)


PROFILE = FileKind(
    type=HostsProfile,
    name="profile of hosts",
    example="gpu_model: H100-SXM5-80GB",
    advice="bench schema manual says what is in it",
)


class ManualLauncher(Launcher):
    """A person starts the workers, on one host or on several that share the study's folder."""

    name = "manual"
    options = frozenset({"site"})
    site_file = PROFILE

    def accept(self, call: MatrixCall) -> ManualCall:
        site = call.options.site
        return ManualCall(call, None if site is None else PROFILE.read(Path(site)))

    def offer(self) -> str:
        return "on several hosts --launcher manual runs it"


class ManualCall(LauncherCall):
    """One call."""

    def __init__(self, call: MatrixCall, profile: HostsProfile | None) -> None:
        self._call = call
        self._machine = Machine.here()
        self.hosts = WorkerHosts(has_gpus=bool(self._machine.gpu_names))
        if profile is not None:
            self._machine = replace(self._machine, gpu_names=(profile.gpu_model,))
            self.hosts = WorkerHosts(
                has_gpus=True, gpus_per_node=profile.gpus_per_node, gpu_model=profile.gpu_model
            )

    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        show_plan(self._call, study, plan, Conditions.here(code), line=typed_line, hosts=self._machine)

    def run(self, study: Study, plan: Plan, code: CodeVersion, lock: int) -> int:
        """Write a launch file for everything that is left of the plan, and print how to start each.

        On every host of a launch the same line is run with that host's NODE_RANK (0, 1, ...), and HOST:PORT
        the address of the host whose NODE_RANK is 0. A launch that was written before and not started is
        printed again.
        """
        options, console = self._call.run_options, self._call.console
        so_far = study_tally(study, plan, study.collect(), Conditions.here(code), options)
        context = CampaignContext(starter=LocalStarter(), checkout=checkout(), code=code)
        maker = LaunchMaker(plan, options, Machine.here(), context)
        waiting = {
            (launch.placement, *((slot.cell_id, slot.repeat) for slot in launch.slots)): launch
            for launch in reversed(study.launches())
            if _waits(study, launch, code, options)
        }
        for planned in so_far.planned(options.isolation):
            runs = ((cell.id, planned.repeat) for cell in planned.cells)
            launch = waiting.get((planned.placement, *runs))
            if launch is None:
                launch = msgspec.structs.replace(
                    maker.launch(planned, planned.cells, so_far),
                    # This process does not know which hosts will run the launch, and does not supervise it.
                    evidence=Evidence.EMULATED if planned.virtual else Evidence.MEASURED,
                    pin=True,
                    supervisor_pid=None,
                )
                study.add_launch(launch)
            path = study.launch_folder(launch.launch_id).resolve() / "launch.json"
            console.result(f"# repeat {planned.repeat}, {planned.placement.gpus} workers")
            console.result(typed_line(launch, path))
        console.note(
            "run each line on every host of its launch, NODE_RANK 0, 1, ... and HOST:PORT the address of "
            f"node 0, in the environment where bench is installed; then: {bench_call('report', study.root)}"
        )
        return 0


def typed_line(launch: Launch, path: Path) -> str:
    """The line to type on every host, with words instead of the host's number and of node 0's address."""
    told = torchrun_command(launch, path, node_rank="NODE_RANK", endpoint="HOST:PORT", python="python")
    return shell_line(launch, told)


def _waits(study: Study, launch: Launch, code: CodeVersion, options: RunOptions) -> bool:
    """Whether nobody has started a launch of an earlier call, and this call would write the same."""
    kept = launch.trace, launch.tensorboard, launch.proof
    asked = options.trace, options.tensorboard, options.proof
    return (
        launch.supervisor_pid is None
        and (launch.code.code_hash, launch.code.packages) == (code.code_hash, code.packages)
        and kept == asked
        and not study.begun_slots(launch)
    )
