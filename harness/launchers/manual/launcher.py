"""The launcher `manual`."""

from __future__ import annotations

from harness.launch.machine import Machine
from harness.launch.tally import Conditions
from harness.launchers.campaign_call import show_plan
from harness.launchers.launcher import Launcher, LauncherCall, MatrixCall, WorkerHosts
from harness.launchers.manual.launches import typed_line, write_launches
from results.environment import CodeVersion
from results.plan import Plan
from results.store import Study


class ManualLauncher(Launcher):
    """A person starts the workers, on one host or on several that share the study's folder."""

    name = "manual"

    def accept(self, call: MatrixCall) -> ManualCall:
        return ManualCall(call)

    def offer(self) -> str:
        return "on several hosts --launcher manual runs it"


class ManualCall(LauncherCall):
    """One call."""

    def __init__(self, call: MatrixCall) -> None:
        self._call = call
        self.hosts = WorkerHosts(has_gpus=bool(Machine.here().gpu_names))

    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        show_plan(self._call, study, plan, Conditions.here(code), typed_line)

    def run(self, study: Study, plan: Plan, code: CodeVersion, lock: int) -> int:
        write_launches(study, plan, self._call.run_options, code, self._call.console)
        return 0
