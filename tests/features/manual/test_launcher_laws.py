"""The laws of all launchers for the one by which a person starts the workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launcher_laws import PATIENCE_S, LauncherLaws, a_port


class TestManual(LauncherLaws):
    name = "manual"
    gpus = "2"

    def finish(self) -> None:
        """Type the printed line on both hosts."""
        lines = [line for line in self.call().out.splitlines() if "torch.distributed.run" in line]
        typed = [
            line.replace("NODE_RANK", str(rank)).replace("HOST:PORT", f"127.0.0.1:{a_port()}")
            for line in lines
            for rank in (0, 1)
        ]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "GLOO_SOCKET_IFNAME": "lo"}
        hosts = [subprocess.Popen(["sh", "-c", f"exec env {line}"], env=environment) for line in typed]
        assert [host.wait(PATIENCE_S) for host in hosts] == [0] * 2

    def test_times_are_those_of_the_gpu_of_the_profile(self) -> None:
        (self.folder / "hosts.yaml").write_text("gpu_model: H100-SXM5-80GB\ngpus_per_node: 1\n")
        done = self.call(dry_run=True, device="auto", site="hosts.yaml", gpus_per_node=None)
        assert (done.code, done.errors) == (0, "")
        assert "ddp on 2 GPUs" in done.out
        assert "2 nodes x 1" in done.out
        assert "follow from their FLOPs" in done.out
        (self.folder / "hosts.yaml").write_text("gpu_model: no-such\n")
        assert self.call(dry_run=True, site="hosts.yaml").code == 2
