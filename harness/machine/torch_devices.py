"""Ask which torch is installed, and what it can do with CUDA devices, without importing it here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec

from results import files

LONGEST_S = 180.0
_QUESTION = """
import json, torch
error, devices = "", 0
try:
    if torch.version.cuda is not None:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{index}").item()
            devices += 1
except Exception as caught:
    error = " ".join(str(caught).split("\\n", 1)[0].split()) or type(caught).__name__
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices, "error": error}
print(json.dumps(found))
"""
"""A number is written to each device and read back: a driver that is too old, a GPU that another process has
for itself or that torch has no kernels for, and one that is lost fail here."""


_VERSION = re.compile(r"^__version__ = '([^']+)'", re.MULTILINE)


def torch_version() -> str | None:
    """Return `torch.__version__`, which ranks record, without importing torch; None if it is not installed.

    The metadata of a CUDA build from PyPI lack the local part of the version: 2.15.0 for 2.15.0+cu132.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    match = _VERSION.search(files.read(Path(found.origin).with_name("version.py")).text)
    return None if match is None else match[1]


class TorchDevices(msgspec.Struct, frozen=True, kw_only=True):
    """torch's own answer."""

    torch: str
    cuda: str | None
    """The version that torch is built for; None: it is built without."""
    devices: int
    """Number of devices that torch can compute on."""
    error: str = ""
    """Why torch cannot use one, in its words; empty: it can use all that CUDA shows it."""


@cache
def ask_torch() -> TorchDevices:
    """Ask torch, in a child process, for its version and its devices.

    This takes some seconds, so this process does it only once. If torch cannot be imported, the answer has an
    `error`.
    """
    command = [sys.executable, "-P", "-W", "ignore", "-c", _QUESTION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LONGEST_S)
        lines = done.stdout.splitlines()
        return msgspec.json.decode(lines[-1] if lines else "", type=TorchDevices)
    except subprocess.TimeoutExpired:
        why = f"torch did not answer in {LONGEST_S:.0f} s"
    except msgspec.DecodeError:
        said = done.stderr.strip().splitlines()
        why = said[-1] if said else f"the process that imported torch ended with exit code {done.returncode}"
    return TorchDevices(torch="", cuda=None, devices=0, error=why)
