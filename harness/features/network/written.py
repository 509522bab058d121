"""The files that nccl-tests (`-J FILE`) and rccl-tests (`-Z json`, `-Z csv`) write, as rows.

A file of nccl-tests names one device of each process. In a file of rccl-tests `ranks` are processes and
`nodes` are groups; without MPI it has `gpus` instead. rccl-tests does not record hosts.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from results.errors import UsageError

WRITTEN = re.compile(r"\s*(\{|\[\s*([{\]]|\Z)|[^\n]*algbw *,)", re.IGNORECASE)
"""How a text begins that a test wrote to a file, and did not print."""
ALONE = "several groups at once share their links: test one at a time"


class Row(NamedTuple):
    """One size of a test, out of place: bytes of the array, us and GB/s, or NaN. No `wrong`: not checked."""

    place: str
    test: str
    ranks: int
    nodes: int
    wrong: object
    size: float
    time_us: float
    algbw: float
    busbw: float


def read_written(text: str, path: Path, ranks_per_node: int | None) -> tuple[list[Row], list[str], int]:
    """The rows of a file, the names of its devices, and the number of its version of NCCL, or 0.

    Raises UsageError for a damaged file, for one of another program, for several groups at once, and for one
    without hosts where `ranks_per_node` is None.
    """
    try:
        found = json.loads(text) if text.lstrip()[0] in "{[" else [*csv.DictReader(text.splitlines())]
        if not isinstance(found, dict):
            return list(_rccl(found, path, ranks_per_node)), [], 0
        devices = [one["device_info"] for one in found["config"]["devices"]]
        return list(_nccl(found, path)), devices, int(found["nccl_version"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{path} is damaged, or of another form than nccl-tests -J and rccl-tests -Z json and csv write "
            f"({type(error).__name__}: {error}): give the file of a test that has ended by itself"
        ) from error


def _nccl(found: dict[str, Any], path: Path) -> Iterator[Row]:
    config, devices = found["config"], found["config"]["devices"]
    if any(one["group"] for one in devices):
        raise UsageError(f"{path}: {ALONE}")
    ranks = len(devices) * int(config["nthreads"]) * int(config["ngpus"])
    test, hosts = Path(found["args"][0]).name.removesuffix("_perf"), {one["hostname"] for one in devices}
    for number, one in enumerate(found["results"], 1):
        # Null where a test has no such figures; with -C 1 it has the time of the CPU instead.
        told = {"size": one["size"]} | (one["out_of_place"] or {})
        figures = (float(told.get(name, nan)) for name in ("size", "time", "alg_bw", "bus_bw"))
        yield Row(f"result {number} of {path}", test, ranks, len(hosts), told.get("nwrong"), *figures)


def _rccl(found: list[dict[str, Any]], path: Path, ranks_per_node: int | None) -> Iterator[Row]:
    for number, row in enumerate(found, 1):
        plain = (name.casefold().lstrip("#").replace("collective", "name") for name in row)
        one = dict(zip(plain, row.values(), strict=True))
        if str(one["inplace"]) != "0":
            continue
        if int(one.get("nodes", 1)) > 1:
            raise UsageError(f"{path}: {ALONE}")
        if "gpus" in one:
            ranks, nodes = int(one["gpus"]), 1
        elif ranks_per_node is None:
            raise UsageError(f"{path} does not name hosts: give --gpus-per-node N, the ranks on each")
        else:
            ranks = int(one["ranks"]) * int(one["gpusperrank"])
            nodes = -(-ranks // ranks_per_node)
        told = (one[name] for name in ("size", "time", "algbw", "busbw"))
        figures = (nan if value in (None, "") else float(value) for value in told)
        yield Row(f"result {number} of {path}", one["name"], ranks, nodes, one["wrong"], *figures)
