"""The output of nccl-tests and rccl-tests as a network table: what they print, or write (`written.py`).

The printed lines, of versions 2.0 to 2.17; a launcher may put a rank's number in front of each:

    # Collective test starting: all_reduce_perf
    #  Rank  0 Group  0 Pid  4711 on   node-a device  0 [0000:07:00] NVIDIA A100-SXM4-80GB
    #       size   count  type  redop  root   time  algbw  busbw  #wrong   time  algbw  busbw  #wrong
        33554432 8388608 float    sum    -1  386.4  86.84  162.8       0  387.1  86.68  162.5       0

The out-of-place columns, the first ones, are read: times in us, bandwidths in GB/s. A row whose figures
contradict each other, as in a torn line, is left out with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from statistics import median

from harness.features.network.written import ALONE, WRITTEN, Row, read_written
from results import files
from results.errors import UsageError
from results.network import Collective, Key, Measurement, NetworkFacts, NetworkTable, busbw_factor
from results.outcome import Evidence
from results.store import utc_text

_NAMES: Mapping[str, Collective] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "sendrecv": "send",
}
_PLAIN = {name.replace("_", ""): collective for name, collective in _NAMES.items()}
_PREFIX = re.compile(r"^(\[\d+,\d+\]<std\w+>:|\s*\d+: )")
_STARTING = re.compile(r"Collective test starting: (\w+?)(_perf)?\s*$")
_ROW = re.compile(r"\d+\s+\d+\s+[a-z]\w*\s")
_BEGINS = re.compile(r"#\s*(nThread |Collective test starting)")
_RANK = re.compile(
    r"#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[.*?\]\s+(.+)"
)
_LIBRARY = re.compile(r"nccl-library=(\d{5})\b|NCCL version (\d+\.\d+\.\d+)")
_WORST = 0.05
"""Largest relative difference of figures that say the same; printed ones have 2 to 4 digits."""
_LEAST = 0.011
"""The same in GB/s, where bandwidths are small."""
_DISAGREE = 2.0
"""Times of one size that differ by a larger factor are not pooled."""


def read_nccl_tests(paths: Sequence[Path], ranks_per_node: int | None = None) -> NetworkTable:
    """The table of outputs of nccl-tests on one cluster; files of rccl-tests need `ranks_per_node`.

    Raises UsageError for files without a usable row, of several environments, or whose times of one size
    differ by more than a factor of 2, and StoreError for a file that cannot be read.
    """
    reader = _Reader()
    for path in paths:
        reader.read(path, ranks_per_node)
    return reader.table(max(path.stat().st_mtime for path in paths))


class _Reader:
    """Collects the rows of several files."""

    def __init__(self) -> None:
        self._times: dict[Key, list[tuple[float, str]]] = {}
        """Seconds, and the place of the line."""
        self._absent: dict[str, str] = {}
        self._names: dict[str, dict[str, str]] = {"devices": {}, "versions of NCCL": {}}
        """The names found, each with the place of the first line that has it."""
        self._begin(None)

    def _begin(self, collective: Collective | None) -> None:
        """Begin the output of one call of a test."""
        self._collective = collective
        self._hosts: list[str] = []
        self._head: list[str] = []

    def read(self, path: Path, ranks_per_node: int | None) -> None:
        text = files.read_given(path).text
        if WRITTEN.match(text):
            self._written(path, *read_written(text, path, ranks_per_node))
            return
        by_name = next((_NAMES[name] for name in _NAMES if name in path.name.replace("-", "_")), None)
        self._begin(by_name)
        rows = 0
        for number, line in enumerate(text.splitlines(), 1):
            line, place = _PREFIX.sub("", line).strip(), f"line {number} of {path}"
            if _BEGINS.match(line) and self._head:
                self._begin(by_name)
            if not _ROW.match(line):
                self._words(line, place)
                continue
            rows += 1
            try:
                self._row(line, place)
            except ValueError as error:
                self._absent[place] = str(error)
        if not rows:
            raise UsageError(f"{path} has no row of nccl-tests: give the text that all_reduce_perf prints")

    def _words(self, line: str, place: str) -> None:
        """Take the facts of a comment, or of NCCL's own line."""
        if match := _LIBRARY.search(line):
            version = f"NCCL {match[2]}" if match[2] else _version(int(match[1]))
            self._names["versions of NCCL"].setdefault(version, place)
        if match := _STARTING.search(line):
            self._collective = _NAMES.get(match[1])
        elif match := _RANK.match(line):
            if match[1] not in (None, "0"):
                raise UsageError(f"{place}: {ALONE}")
            self._hosts.append(match[2])
            self._names["devices"].setdefault(match[3].strip(), place)
        elif line.startswith("#") and "busbw" in line:
            self._head = line.removeprefix("#").split()

    def _row(self, line: str, place: str) -> None:
        """Take a row. Raises ValueError for a damaged one, and UsageError where its test is not known."""
        name, words, hosts = self._collective, line.split(), self._hosts
        if name is None:
            known = ", ".join(_NAMES)
            raise UsageError(
                f"{place} is of no known test: name the file after it, all_reduce.txt say ({known})"
            )
        if not self._head or len(words) != len(self._head):
            raise ValueError(f"it has {len(words)} columns, and the head {len(self._head)}")
        at = self._head.index("time")
        figures = (float(word) for word in (words[0], *words[at : at + 3]))
        self._take(name, Row(place, name, len(hosts), len(set(hosts)), words[at + 3], *figures))

    def _take(self, name: Collective, row: Row) -> None:
        """Take a row. Raises ValueError for a damaged one."""
        if any(map(isnan, row[5:])):
            raise ValueError("a number is missing: the file is torn, or the test has no out-of-place times")
        place, _, ranks, nodes, wrong, _, time_us, algbw, busbw = row
        size = int(row.size)
        payload = size // ranks if name == "all-gather" and ranks else size
        if payload == 0:
            return
        if str(wrong) not in ("0", "0.0", "0e+00", "N/A", "None"):
            raise ValueError(f"the test found wrong results ({wrong})")
        if ranks < 2 or (name == "send" and ranks > 2):
            raise ValueError(f"the output names {ranks} ranks before it")
        if not time_us > 0 or not _near(algbw, size / time_us / 1e3):
            raise ValueError(f"{size} bytes in {time_us} us are not {algbw} GB/s")
        if not _near(busbw, algbw * busbw_factor(name, ranks)):
            raise ValueError(f"busbw {busbw} is not that of {name} over the {ranks} ranks named")
        key = (name, payload, ranks, nodes)
        self._times.setdefault(key, []).append((time_us / 1e6, place))

    def _written(self, path: Path, rows: list[Row], devices: list[str], version: int) -> None:
        """Take what a test has written to a file."""
        if not rows:
            raise UsageError(f"{path} has no row that is out of place: run the test without -O 0")
        for row in rows:
            name = _PLAIN.get(row.test.replace("_", "").casefold())
            if name is None:
                raise UsageError(f"{row.place} is of {row.test!r}: read are {', '.join(_NAMES)}")
            try:
                self._take(name, row)
            except ValueError as error:
                self._absent[row.place] = str(error)
        self._names["devices"] |= dict.fromkeys(devices, str(path))
        if version:
            self._names["versions of NCCL"][_version(version)] = str(path)

    def table(self, moment: float) -> NetworkTable:
        for kind, names in self._names.items():
            if len(names) > 1:
                told = ", ".join(f"{name} ({place})" for name, place in names.items())
                raise UsageError(f"the files are of several {kind}: {told}; give the files of one cluster")
        if not self._times:
            place, why = next(iter(self._absent.items()), ("the files", "no row has bytes"))
            raise UsageError(f"no row can be used; {place}: {why}")
        device, library = (next(iter(names), None) for names in self._names.values())
        return NetworkTable(
            source="nccl-tests",
            measured_at=utc_text(datetime.fromtimestamp(moment, UTC)),
            facts=NetworkFacts(backend="nccl", device_name=device, library=library),
            evidence=Evidence.MEASURED,
            measurements=tuple(_measurement(key, times) for key, times in self._times.items()),
            absent=self._absent,
        )


def _measurement(key: Key, times: Sequence[tuple[float, str]]) -> Measurement:
    """Raises UsageError for times that disagree."""
    (low, first), (high, last) = min(times), max(times)
    collective, payload, ranks, _ = key
    if high > _DISAGREE * low:
        raise UsageError(
            f"{collective} of {payload} bytes over {ranks} ranks took {low * 1e6:.4g} us in {first} and "
            f"{high * 1e6:.4g} us in {last}: leave out the file of the disturbed or other environment"
        )
    return Measurement.of(key, median(time for time, _ in times), low, high, len(times))


def _version(code: int) -> str:
    return f"NCCL {code // 10000}.{code // 100 % 100}.{code % 100}"


def _near(told: float, computed: float) -> bool:
    return abs(told - computed) <= max(_LEAST, _WORST * computed)
