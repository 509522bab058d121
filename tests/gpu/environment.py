"""The environment of `make gpu`: `python tests/gpu/environment.py FOLDER [WHEELS]`, by the Python with torch.

It sees all packages of that Python, and the checkout. pip installs only the small packages that are missing,
and never torch; from the wheels in the folder WHEELS, where one is given, without a network.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib import metadata, util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = "#!{python}\nimport sys\nfrom harness.cli import main\nsys.exit(main())\n"


def missing(packages: Path) -> list[str]:
    """The requirements, other than torch, that neither this Python nor the folder `packages` satisfies."""
    import tomllib  # Python 3.10, which `main` refuses, lacks it.

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    for needed in project["dependencies"]:
        name, least = needed.split(",")[0].split(">=")
        there = next(iter(metadata.distributions(name=name, path=[str(packages), *sys.path])), None)
        if name != "torch" and (there is None or _numbers(there.version) < _numbers(least)):
            found.append(needed)
    return found


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def main(folder: Path, wheels: str | None = None) -> str | None:
    """Make the environment. Returns a sentence if it lacks something."""
    if any(util.find_spec(name) is None for name in ("torch", "tomllib")):
        return (
            f"{sys.executable} is Python {sys.version.split()[0]}, and `make gpu` needs Python 3.11 or later "
            f"with torch, which it never installs: name one with PYTHON=..."
        )
    venv = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder)]
    subprocess.run(venv, check=True)
    python = folder.absolute() / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    # All packages of this Python are seen, also if it is of a virtual environment.
    seen = [str(ROOT), *(path for path in sys.path if path.endswith("-packages"))]
    (packages / "bench.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    bench = python.with_name("bench")
    bench.write_text(BENCH.format(python=python), encoding="utf-8")
    bench.chmod(0o755)
    needed = missing(packages)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    source = ["--retries=1"] if wheels is None else ["--no-index", "--find-links", wheels]
    if needed and subprocess.run([*pip, "--quiet", *source, *needed]).returncode:
        names = " ".join(f"'{each}'" for each in needed)
        return (
            f"pip could not install what is missing here: {names}. Without a network: call `pip download "
            f"-d wheels {names}` elsewhere with Python {sys.version_info[0]}.{sys.version_info[1]}, copy the "
            f"folder here, and call: make gpu WHEELS=wheels"
        )
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
