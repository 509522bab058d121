"""A study file: every option of `bench matrix` as YAML, read with its types checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from harness.plan.options import BY_NAME, OPTIONS, Counts, Names, check, nearest
from results.cell import Backend, MemoryFormat, Precision
from results.errors import UsageError
from results.plan import Pattern

_DEEPEST = 8
_SURPRISING = re.compile(r"[-+]?(0[0-7_]+|0[xb][0-9a-fA-F_]+|[0-9][0-9_]*(:[0-5]?[0-9])+)")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*?)`(?: - at `(?P<at>\$.*)`)?", re.DOTALL)
_AT = re.compile(r"(?P<what>.*?)(?: - at `(?P<at>\$.*)`)?", re.DOTALL)


class StudyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a study file or the flags give; None is what they leave out."""

    name: str | None = None
    workload: Names | None = None
    gpus: Counts | None = None
    strategy: Names | None = None
    compression: Names | None = None
    collective: Names | None = None
    link: Names | None = None
    batch_size: Counts | None = None
    global_batch_size: Counts | None = None
    scaling: Names | None = None
    repeats: int | None = None
    dataset: str | None = None
    device: Literal["auto", "cpu", "cuda"] | None = None
    backend: Backend | None = None
    precision: Precision | None = None
    accumulation: int | None = None
    optimizer: str | None = None
    clip_norm: float | None = None
    activation_checkpointing: bool | None = None
    selective_checkpointing: bool | None = None
    memory_limit_mb: int | None = None
    compile: bool | None = None
    memory_format: MemoryFormat | None = None
    seed: int | None = None
    gpus_per_node: int | None = None
    node_size: int | None = None
    budget: float | str | None = None
    """Seconds, or a time like 30s or 2m."""
    target: float | None = None
    warmup_steps: int | None = None
    block_steps: int | None = None
    quads: int | None = None
    launcher: str | None = None
    site: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus_per_gpu: int | None = None
    time: float | str | None = None
    """Seconds, or a time like 30m or 2h."""
    jobs_per_cell: bool | None = None
    feed: Literal["once", "wait", "depend"] | None = None
    max_gpu_hours: float | None = None
    report_job: bool | None = None
    apply: bool | None = None
    kind: Literal["job", "statefulset"] | None = None
    isolation: Literal["launch", "cell"] | None = None
    oversubscribe: bool | None = None
    max_time: float | str | None = None
    """Seconds, or a time like 30m or 2h."""
    hang_after: float | str | None = None
    """Seconds, or a time like 90s or 15m."""
    retries: int | None = None
    prune: bool | None = None
    rerun: Literal["failed"] | None = None
    trace: Counts | None = None
    """Ranks, from 0."""
    tensorboard: bool | None = None
    out: str | None = None
    include: list[Pattern] | None = None
    """Points beside the matrix; each names at least workload, strategy, gpus and batch_size."""
    exclude: list[Pattern] | None = None
    """Points of the matrix that are not run."""


def merge(file: StudyFile, flags: StudyFile) -> StudyFile:
    """The options of both; where both give one, the flag wins."""
    given = {key: value for key, value in msgspec.structs.asdict(flags).items() if value is not None}
    return msgspec.structs.replace(file, **given)


def check_values(options: StudyFile, where: Callable[[str], str]) -> None:
    """Hold every given value against its rule. Raises UsageError, naming the key as `where` does."""
    for option in OPTIONS:
        value = getattr(options, option.name)
        if value is not None:
            check(option, value, where(option.name))


def read_study_file(path: Path) -> StudyFile:
    """The options in a YAML file.

    Raises UsageError: one line with the path, the offending key (`$.gpus`) or line, and the rule.
    """
    text = _text(path)
    _check_shape(text, path)
    try:
        options = msgspec.yaml.decode(text, type=StudyFile)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {_translated(str(error))}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}{_untangled(str(error))}") from error
    except (ValueError, OverflowError) as error:
        # What YAML takes for a date or a number and Python cannot hold, such as 2024-13-45.
        raise UsageError(f"{path} holds a value that cannot be read: {error}; quote it") from error
    check_values(options, lambda key: f"{path}: $.{key}")
    return options


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"there is no study file {path}; check the name, or give flags alone") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a YAML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}); name a YAML file") from error


def _check_shape(text: str, path: Path) -> None:
    """Refuse what a YAML parser would take silently or crash on: keys given twice, bottomless nesting.

    Walks the parser's events, which neither recurse nor build objects.
    """
    shape = _Shape(path)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            shape.visit(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        # An end that is missing is marked on the line after the last.
        line = 1 if mark is None else min(mark.line, text.rstrip().count("\n")) + 1
        raise UsageError(f"{path}, line {line}: not readable as YAML: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise UsageError(f"{path}, line {line}: not readable as YAML: {error.reason}") from error


@dataclass(slots=True)
class _Open:
    """A mapping or a list whose end has not come yet."""

    is_mapping: bool
    keys: set[str] = field(default_factory=set)
    key_is_next: bool = True


class _Shape:
    """What is open at a point of the event stream."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: list[_Open] = []

    def visit(self, event: yaml.Event) -> None:
        """Take the next event. Raises UsageError with its line."""
        if isinstance(event, yaml.CollectionEndEvent):
            self._open.pop()
        elif isinstance(event, yaml.NodeEvent):
            assert event.start_mark is not None
            where = f"{self._path}, line {event.start_mark.line + 1}"
            self._place(event, where)
            if isinstance(event, yaml.ScalarEvent):
                self._check_number(event, where)
            if isinstance(event, yaml.CollectionStartEvent):
                if len(self._open) == _DEEPEST:
                    raise UsageError(f"{where}: nested deeper than any option is; see bench matrix --help")
                self._open.append(_Open(is_mapping=isinstance(event, yaml.MappingStartEvent)))

    def _check_number(self, event: yaml.ScalarEvent, where: str) -> None:
        """Refuse what YAML 1.1 takes for a number of another value: 1:30 is 90 to it, 010 is 8."""
        if not event.style and _SURPRISING.fullmatch(event.value):
            raise UsageError(
                f"{where}: {event.value} is another number to YAML than to you; write it plainly"
            )

    def _place(self, event: yaml.NodeEvent, where: str) -> None:
        """Note a key of the innermost mapping; a key given twice would win silently."""
        if not self._open or not self._open[-1].is_mapping:
            return
        mapping = self._open[-1]
        if mapping.key_is_next and isinstance(event, yaml.ScalarEvent):
            if event.value in mapping.keys:
                raise UsageError(f"{where}: {_one_line(event.value)} is given twice; keep one")
            mapping.keys.add(event.value)
        mapping.key_is_next = not mapping.key_is_next


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _untangled(message: str) -> str:
    """YAML's own report of a tag or an anchor, which has marks between its lines, in one line."""
    lines = re.findall(r"line (\d+)", message)
    words = [line.strip() for line in message.splitlines() if not line.startswith("  in ")]
    return f"{', line ' + lines[-1] if lines else ''}: not readable as YAML: {', '.join(words)}"


def _translated(message: str) -> str:
    unknown = _UNKNOWN.fullmatch(message)
    if unknown is not None:
        at = unknown["at"] or "$"
        known = [*BY_NAME, "include", "exclude"] if at == "$" else list(Pattern.__struct_fields__)
        key = _one_line(unknown["key"])
        return f"{at}.{key} is not an option{nearest(key, known)}; there are: {', '.join(known)}"
    match = _AT.fullmatch(message)
    assert match is not None
    at = match["at"]
    if at is None:
        return f"a study file holds `option: value` lines, such as gpus: 1..8 ({match['what']})"
    key = at.rpartition(".")[2]
    choices = BY_NAME[key].choices if key in BY_NAME else ()
    rule = f"; it is one of {', '.join(choices)}" if choices else ""
    return f"{at}: {_one_line(match['what'])}{rule}"
