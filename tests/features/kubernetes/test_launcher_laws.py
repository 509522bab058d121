"""The laws of all launchers for the one that writes manifests, whose pods are programs here."""

from __future__ import annotations

import os
import subprocess
import sys

from launcher_laws import PATIENCE_S, JobLaws


class TestKubernetes(JobLaws):
    name = "kubernetes"
    gpus = "1"

    def options(self) -> dict[str, object]:
        (self.folder / "site.yaml").write_text(
            f"image: bench:1\nvolume_claim: results\nmount_path: {self.folder}\ngpu_resource: none\n"
        )
        return {"site": "site.yaml"}

    def finish(self) -> None:
        """Run the programs of the pods, one for each job of one node."""
        for folder in sorted(self.study.root.glob("jobs/*")):
            subprocess.run(
                [sys.executable, "-m", "harness.launchers.program", str(folder)],
                env={**os.environ, "JOB_COMPLETION_INDEX": "0"},
                check=True,
                timeout=PATIENCE_S,
            )
