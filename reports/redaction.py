"""Remove names of people and places from a study, so that its report can be shared.

Hosts, users, paths, addresses, device ids and a scheduler's numbers become `node-1`, `user-1`, `path-1` and
so on. One `Redactor` gives the same thing the same name in all strings of all its studies, and different
things different names. Versions, devices' marketing names, settings and the commit stay.

It redacts the input of a report, so pages, tables and files need no redaction. It reads all strings except
the listed fields that stay.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from results.plan import Plan
from results.review import Review
from results.run import RunResult

KEPT_FIELDS = frozenset(
    {"run_id", "run_ids", "launch_id", "fingerprint", "code_hash", "commit", "user_commit", "names_hash"}
    | {"source_hash", "dataset_hash", "kind"}
    | {"created_at", "started_at", "at", "state", "python", "torch", "driver", "cuda", "nccl"}
)
"""Hashes, times, versions, kinds and random ids: they identify nobody, and some look like addresses."""
_NOBODY = frozenset({"root", "user", "bench", "localhost"})
"""Names that do not identify anyone."""
_EDGE, _END = r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])"
_PATH_CHARACTERS = r"[^\s'\"<>|,;:()\[\]{}]"
_TOP = "home|Users|root|tmp|var|mnt|data|scratch|work|opt|srv|gpfs|lustre|nfs|nvme|etc|usr|proc|dev|run"
_HOME = re.compile(r"(?:/home|/Users)/([A-Za-z0-9][\w.-]*)")
_PATTERNS = (
    # Secrets come first, because a token may be a part of an address or a path: forms of Hugging Face,
    # GitHub, GitLab, OpenAI, Slack, Google, AWS and JSON Web Tokens, then values that a text calls a secret.
    ("secret", r"\b(?:hf_|ghp_|gho_|ghs_|github_pat_|glpat-|sk-|xox[abprs]-|AIza)[\w-]{10,}"),
    ("secret", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]+\.[\w-]+\.[\w-]*"),
    (
        "secret",
        r"(?i:(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|bearer))['\"]?(?:\s*[:=]\s*|\s+)"
        r"['\"]?(?=[\w./+=-]*\d)[\w./+=-]{8,}",
    ),
    ("address", r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+"),
    # A path may contain blanks only between quotes.
    ("path", r"(?<=')(?:~|\.{1,2})?/[^'\n]+(?=')|(?<=\")(?:~|\.{1,2})?/[^\"\n]+(?=\")"),
    ("path", rf"(?<![\w./~])(?:~[\w.-]*|\.{{1,2}})?/(?=[\w.~@+-]){_PATH_CHARACTERS}*"),
    ("path", rf"/(?:{_TOP})/{_PATH_CHARACTERS}*"),
    # Relative paths: a file in a folder, or four folders deep. `images/s` and `tokens/s/GPU` do not match.
    ("path", r"(?<![\w./])[\w.@+-]+(?:/[\w.@+-]+)*/[\w.@+-]*\.[A-Za-z]\w{0,5}\b"),
    ("path", r"(?<![\w./])[\w.@+-]+(?:/[\w.@+-]+){3,}"),
    ("path", r"\b[A-Za-z]:\\[^\s'\"<>|]+|\\\\[\w.-]+\\[^\s'\"<>|]+"),
    ("device", r"(?:GPU-|MIG-)?\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b"),
    ("device", r"\b[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b"),
    ("device", r"(?i:\bserial(?: number| no\.?)?)[ :=#]+(?=[\w-]*\d)[\w-]{4,}"),
    ("user", r"[\w.+-]+@[A-Za-z][\w-]*(?:\.[\w-]+)*"),
    ("job", r"(?i:\b(?:slurm|(?:array[ _-]?)?job(?:[ _-]?(?:id|step))?|stepid|allocation))[ =:#]+\d[\w.+-]*"),
    ("address", r"\b(?:\d{1,3}\.){3}\d{1,3}\b"),
    ("address", r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{1,4}(?![\w:])"),
)
"""The kinds of names, with the patterns that find them; if two match at one place, the first counts."""


@dataclass(frozen=True, slots=True)
class Told:
    """The input of a study's report."""

    name: str
    plans: Sequence[Plan]
    results: Sequence[RunResult]
    review: Review = field(default_factory=Review)


@dataclass(slots=True)
class Redactor:
    """Replaces names consistently in all strings that it is given."""

    pattern: re.Pattern[str]
    kinds: tuple[str, ...]
    """The kind of each group of the pattern."""
    names: dict[tuple[str, str], str] = field(default_factory=dict)

    def study(self, told: Told) -> Told:
        """The study without names of people and places. Cells that contain a path get another id."""
        ids = {cell.id: self.value(cell).id for plan in told.plans for cell in plan.cells}
        return Told(
            name=self.text(told.name),
            plans=[self._plan(plan, ids) for plan in told.plans],
            results=[
                msgspec.structs.replace(
                    self.value(result), cell_id=ids.get(result.cell_id) or self.text(result.cell_id)
                )
                for result in told.results
            ],
            review=self.value(told.review),
        )

    def text(self, text: str) -> str:
        """The text with names replaced by stand-ins."""
        return self.pattern.sub(self._stand_in, text)

    def _plan(self, plan: Plan, ids: dict[str, str]) -> Plan:
        series = tuple(
            msgspec.structs.replace(self.value(one), cells=tuple(ids[cell_id] for cell_id in one.cells))
            for one in plan.series
        )
        predicted = {ids[cell_id]: size for cell_id, size in plan.predicted_bytes.items()}
        # Words that a user typed, or from errors of a user's model, may contain any name.
        redacted: Plan = self.value(msgspec.structs.replace(plan, series=()))
        return msgspec.structs.replace(
            redacted, series=series, predicted_bytes=predicted, command=(), unpredicted={}
        )

    def value(self, value: Any) -> Any:
        """Return the value with all its strings redacted, except the fields that stay."""
        if isinstance(value, str):
            return value if isinstance(value, Enum) else self.text(value)
        if isinstance(value, msgspec.Struct):
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
            changed = {name: self.value(one) for name, one in fields.items() if name not in KEPT_FIELDS}
            return msgspec.structs.replace(value, **changed)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {one.name: self.value(getattr(value, one.name)) for one in dataclasses.fields(value)}
            return dataclasses.replace(value, **parts)
        if isinstance(value, dict):
            # Keys are names of fields, phases and settings.
            return {key: self.value(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.value(one) for one in value)
        return value

    def _stand_in(self, match: re.Match[str]) -> str:
        kind = self.kinds[(match.lastindex or 1) - 1]
        # A full stop at the end belongs to the sentence, not to the path.
        found = match[0].rstrip(".") or match[0]
        key = (kind, _short(found) if kind == "node" else found)
        number = sum(other == kind for other, _ in self.names) + 1
        return self.names.setdefault(key, f"{kind}-{number}") + match[0][len(found) :]


def redactor(
    studies: Iterable[Told],
    *,
    hosts: Collection[str] = (),
    users: Collection[str] = (),
    paths: Collection[str] = (),
) -> Redactor:
    """The redactor for all studies of a report. The caller may name further hosts, users and paths.

    Hosts are the hosts of the runs and their siblings: with `gpu017`, `gpu018` is a host too. Users are the
    owners of home folders that some string names.
    """
    found = list(studies)
    texts = msgspec.json.encode([*paths, *((one.plans, one.results, one.review.entries) for one in found)])
    known_hosts = {*hosts, *_hosts(result for one in found for result in one.results)}
    known_users = {*users, *_HOME.findall(texts.decode())}
    nodes = sorted((host for host in known_hosts if _tells(host)), key=lambda host: (-len(host), host))
    parts = [
        *(("path", re.escape(path)) for path in sorted(paths, key=len, reverse=True) if len(path) > 1),
        *_PATTERNS,
        *(("node", pattern) for pattern in dict.fromkeys(map(_host_pattern, nodes))),
        *(("user", f"{_EDGE}{re.escape(user)}{_END}") for user in sorted(known_users) if _tells(user)),
    ]
    kinds = tuple(kind for kind, _ in parts)
    made = Redactor(re.compile("|".join(f"({pattern})" for _, pattern in parts)), kinds)
    for host in sorted(nodes):
        made.text(host)
    return made


def _hosts(results: Iterable[RunResult]) -> Iterator[str]:
    for result in results:
        yield from result.hosts
        if result.environment:
            yield result.environment.host


def _host_pattern(host: str) -> str:
    """A pattern for a host by its short or full name in any case, and for its siblings with other numbers."""
    stem = re.fullmatch(r"([A-Za-z][A-Za-z-]{2,}?)\d+", _short(host))
    name = rf"{re.escape(stem[1])}(?:\d+|\[[\d,-]+\])" if stem else re.escape(_short(host))
    return rf"(?i:{_EDGE}{name}(?:\.[a-z][\w-]*)*{_END})"


def _short(host: str) -> str:
    """Remove the domain; an address is kept as it is."""
    lowered = host.lower()
    return lowered if re.fullmatch(r"[\d.:]+", lowered) else lowered.partition(".")[0]


def _tells(name: str) -> bool:
    return len(name) > 1 and name.lower() not in _NOBODY
