"""The launcher `manual`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from harness.launch.machine import Machine
from harness.launch.tally import Conditions
from harness.launchers.campaign_call import show_plan
from harness.launchers.launcher import Launcher, LauncherCall, MatrixCall, WorkerHosts
from harness.launchers.manual.launches import typed_line, write_launches
from results.catalogue.gpus import require_known
from results.environment import CodeVersion
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
        write_launches(study, plan, self._call.run_options, code, self._call.console)
        return 0
