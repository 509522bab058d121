"""The laws of all launchers for `local` and for the example. Those of features are in tests/features."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_laws import PATIENCE_S, CampaignLaws, Done, a_port
from packages import first_on_the_path, install

from harness.matrix import Matrix
from harness.plan.launchers import OWN
from harness.plan.study_file import StudyFile
from results.errors import UsageError
from results.extensions import forget_packages

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SSH = """\
#!/bin/sh
# In the place of ssh: the words after the host are for its shell, which here is one of this machine.
while [ "$1" = -o ]; do shift 2; done
echo "$1" >> "$HOSTS"
shift
exec sh -c "$*"
"""


class TestLocal(CampaignLaws):
    name = "local"

    def options(self) -> dict[str, object]:
        return {"oversubscribe": True}


class TestSsh(CampaignLaws):
    """The example of a launcher from another package, by its entry point."""

    name = "ssh"
    gpus = "2"

    @pytest.fixture(autouse=True)
    def _hosts(self, _folder, monkeypatch) -> Iterator[None]:
        site = self.folder / "site"
        site.mkdir()
        shutil.copy(EXAMPLES / "ssh_launcher.py", site)
        install(site, "bench-ssh", {"bench.launchers": {"ssh": "ssh_launcher:SshLauncher"}})
        monkeypatch.syspath_prepend(str(site))
        forget_packages()
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "ssh").write_text(SSH)
        (self.folder / "bin" / "ssh").chmod(0o755)
        self.variables = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "PYTHONPATH": first_on_the_path(site),
            "HOSTS": str(self.folder / "hosts"),
        }
        yield
        sys.modules.pop("ssh_launcher", None)
        forget_packages()

    def options(self) -> dict[str, object]:
        (self.folder / "hosts.yaml").write_text(
            f"hosts: [127.0.0.1, localhost]\ncpus_per_node: 2\npython: {sys.executable}\n"
            f"environment: {{GLOO_SOCKET_IFNAME: lo}}\nport: {a_port()}\n"
        )
        return {"site": "hosts.yaml"}

    def bench(self, *arguments: str) -> Done:
        """Run bench as a process: the flags of this one were made before the package was installed."""
        done = subprocess.run(
            [*self.command(), *arguments],
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return Done(code=done.returncode, out=done.stdout, errors=done.stderr)

    @pytest.mark.slow
    def test_the_same_command_goes_on_where_it_stopped(self) -> None:
        super().test_the_same_command_goes_on_where_it_stopped()
        assert sorted((self.folder / "hosts").read_text().split()) == ["127.0.0.1", "localhost"]

    @pytest.mark.slow
    def test_more_workers_than_hosts_are_refused(self) -> None:
        for done in (self.call(gpus="4"), self.call(gpus="4", dry_run=True)):
            assert done.code == 2
            assert "--gpus 4 needs 4 hosts, and the list of --site has 2" in done.errors
        assert not self.study.root.exists()

    @pytest.mark.slow
    def test_a_host_that_cannot_be_reached_is_told(self) -> None:
        (self.folder / "bin" / "ssh").write_text("#!/bin/sh\necho no route to host >&2\nexit 255\n")
        done = self.call()
        assert done.code == 1
        assert "no route to host" in done.errors


def test_every_launcher_is_held_to_the_laws() -> None:
    files = (Path(__file__).parents[1] / "features").glob("*/test_launcher_laws.py")
    there = "\n".join(file.read_text() for file in files)
    held = set(re.findall(r'^    name = "(\w+)"$', there, re.MULTILINE))
    assert held | {TestLocal.name} == set(OWN)


def test_an_unknown_launcher_runs_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no launcher 'nowhere'; --launcher is one of local"):
        Matrix(StudyFile(gpus=1, launcher="nowhere"), study_file=None)
    assert not list(tmp_path.iterdir())
