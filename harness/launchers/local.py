"""The launcher `local`: launches on this machine, as children of this process."""

from __future__ import annotations

from pathlib import Path

from harness.launch.command import local_command, shell_line
from harness.launch.preflight import require_torch
from harness.launch.starter import LocalStarter
from harness.launchers.campaign_call import CampaignCall
from harness.launchers.launcher import Launcher, MatrixCall
from results.environment import CodeVersion
from results.launch import Launch
from results.plan import Plan
from results.store import Study


class LocalLauncher(Launcher):
    """Workers are children of this process."""

    name = "local"
    several_hosts = False
    trains = True

    def accept(self, call: MatrixCall) -> LocalCall:
        return LocalCall(call)


class LocalCall(CampaignCall):
    def check(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        require_torch()

    def starter(self) -> LocalStarter:
        return LocalStarter()

    def line(self, launch: Launch, path: Path) -> str:
        return shell_line(launch, local_command(launch, path))
