"""The file of a program: how it is started, what a step of it is, its strategies and settings."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product, zip_longest
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from harness.features.programs import formula
from harness.plan.options import read_variables
from results.cell import Cell
from results.errors import UsageError, nearest
from results.strict_yaml import FileKind, Where
from workloads.shape import WorkUnit
from workloads.source import file_hash

VARIABLES = ("gpus", "batch_size", "micro_batch", "replicas", "accumulation", "seed")
"""The variables of every cell; strategies and settings declare more."""
LOGS = {
    "torchtitan": r"(?<!validate )step:\s*(?P<step>\d+)\s+(?:\x1b\[[\d;]*m)*loss:\s*(?P<loss>[-+.\w]+)",
    "megatron": r"\biteration\s+(?P<step>\d+)/\s*\w+ \|(?:.* \|)? elapsed time per iteration \(ms\):"
    r"(?:.*? lm loss:? (?P<loss>[-+.\w]+))?",
}
"""Patterns over a line of known programs, colours included. Megatron's line may lack a loss."""
Count = Annotated[int, msgspec.Meta(ge=1)]
Line = str | dict[str, str | int]
"""A line of arguments; or `arguments`, of a strategy its `replica`, and variables by name."""
_NAME, _VARIABLE = re.compile(r"[A-Za-z0-9_.-]+"), re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MOST_NAMES, _BATCH = 1000, {"batch_size", "micro_batch"}
_TEMPLATE = re.compile(r"\{(\s*[A-Za-z_(][\w\s+*/()-]*)\}", re.ASCII)
"""A formula in braces. Braces around other text, such as JSON, are the program's own."""
_LAUNCHERS = re.compile(
    r"torchrun|accelerate|deepspeed|horovodrun|mpirun|mpiexec|srun|torch\.distributed\.(run|launch)"
    r"|accelerate\.commands\..*|deepspeed\.launcher\..*"
)
_FREE = re.compile(r"PYTHONPATH|[A-Z]+_NUM_THREADS")
"""Variables that bench sets for itself, and a program may have otherwise."""


class ProgramFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The description of a program. Paths are relative to the file's folder, where the program runs."""

    script: str | None = None
    """A Python file; either it or `module` is given."""
    module: str | None = None
    interpreter: str | tuple[str, ...] | None = None
    """A Python, or the words of a command that ends with one; None: bench's own."""
    arguments: str = ""
    """Words as in a shell, with formulas in braces: `--batch {batch_size}`."""
    batch: Count | None = None
    """The default of --batch-size; None: 8."""
    samples: Count | str = "batch_size * replicas"
    """A formula: samples of one step over all ranks."""
    unit: WorkUnit = "samples"
    units_per_sample: Count | str = 1
    environment: dict[str, str] = {}
    files: tuple[str, ...] = ()
    """Globs: if one of these files changes, or the script, its cells are new ones."""
    steps: Literal["optimizer", "bench_step", "log"] = "optimizer"
    """The event that ends a step."""
    log: str | None = None
    """One of `LOGS`, or a regular expression over a line with groups `step` and `loss`, or one of them."""
    strategies: dict[str, Line]
    settings: dict[str, dict[str, Line]] = {}
    """Further axes; the first value of each is the default, and left out of names."""
    impossible: tuple[dict[str, str | int], ...] = ()
    """Combinations that are skipped, each with its `reason`."""

    def __post_init__(self) -> None:
        if (self.script is None) == (self.module is None):
            raise ValueError("give either a script or a module, such as script: train.py")

    @property
    def default_batch(self) -> int:
        return self.batch or 8

    @property
    def axes(self) -> dict[str, dict[str, Line]]:
        """The lines by axis and value: `strategy`, and the settings."""
        return {"strategy": self.strategies, **self.settings}

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """The pattern over each line of output."""
        return None if self.log is None else re.compile(LOGS.get(self.log, self.log))


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A file with the folder that its paths are relative to, which is absolute."""

    file: ProgramFile
    folder: str


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """The programs of a study by their workload, for its ranks."""

    programs: dict[str, Program]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy with a value of each setting."""

    name: str
    """Canonical: `fsdp+compiled`, without values that are defaults."""
    text: str
    """Its text in a cell, with 6 hex digits over its lines, so that other lines are another strategy."""
    axes: Mapping[str, str]
    """`strategy` and the settings, each with its value."""
    lines: tuple[str, ...]
    """The arguments of the file, of the strategy, and of each setting."""
    declared: Mapping[str, int]
    """The variables of its strategy and settings."""

    @property
    def used(self) -> set[str]:
        """The variables in its lines."""
        return set().union(*map(formula.names, _TEMPLATE.findall(" ".join(self.lines))))

    def variables(self, cell: Cell) -> dict[str, int]:
        """The values of all variables in a cell."""
        own = {name: getattr(cell, name) for name in VARIABLES if name != "batch_size"}
        return own | {"batch_size": cell.batch_per_replica, **self.declared}


def file_kind(folder: Path) -> FileKind[ProgramFile]:
    """The kind of file that describes a program in `folder`; its errors name path, line and key."""
    return FileKind(
        type=ProgramFile,
        name="program file",
        example="script: train.py",
        advice="name it as --workload program:FILE.yaml, from the folder of the study file or of the call",
        check=partial(_check, folder=folder),
    )


def read(path: Path) -> ProgramFile:
    """Read and check a file. Raises UsageError."""
    return file_kind(path.parent).read(path)


def names(file: ProgramFile) -> Iterator[str]:
    """Yield the names of all strategies with all settings, in the order of the file."""
    values = (("", *(f"+{value}" for value in list(each)[1:])) for each in file.settings.values())
    return map("".join, product(file.strategies, *values))


def choice(file: ProgramFile, name: str) -> Choice:
    """The strategy and settings of a name such as `fsdp+compiled`, with a revision or without one.

    Raises UsageError for unknown values, and for two of one setting.
    """
    strategy, *values = name.partition("@")[0].split("+")
    _require(strategy, file.strategies, "strategy")
    defaults = {setting: next(iter(each)) for setting, each in file.settings.items()}
    homes = {value: setting for setting, each in file.settings.items() for value in each}
    for value in values:
        _require(value, homes, "value of a setting")
    given = {homes[value]: value for value in values}
    if len(given) < len(values):
        raise UsageError(f"{'+'.join(values)} has two values of one setting: keep one")
    axes = {"strategy": strategy, **defaults, **given}
    chosen = [_parts(file.axes[axis][value]) for axis, value in axes.items()]
    lines = [str(parts.pop("arguments", "")) for parts in chosen]
    declared = {name: int(value) for parts in chosen for name, value in parts.items()}
    replica = declared.pop("replica", 1)
    short = "+".join(value for axis, value in axes.items() if value != defaults.get(axis))
    revision = _hash([[*filter(None, lines)], declared])[:6]
    text = f"program:{short}@{revision}" + (f":replica={replica}" if replica > 1 else "")
    return Choice(name=short, text=text, axes=axes, lines=(file.arguments, *lines), declared=declared)


def _parts(line: Line) -> dict[str, str | int]:
    return {**line} if isinstance(line, dict) else {"arguments": line}


def _require(name: str, known: Collection[str], what: str) -> None:
    if name not in known:
        there = f"{nearest(name, known)}; there are: {', '.join(known) or 'none'}"
        raise UsageError(f"there is no {what} {name!r}{there}")


def words(file: ProgramFile, strategy: str, cell: Cell) -> list[str]:
    """The arguments of the program in a cell. Raises UsageError for a formula without a whole number."""
    chosen = choice(file, strategy)
    known = chosen.variables(cell)

    def text(template: re.Match[str]) -> str:
        return str(formula.value(template[1], known, least=None))

    # Values are whole numbers, so that none of them can end a word.
    return shlex.split(_TEMPLATE.sub(text, " ".join(chosen.lines)))


def work(file: ProgramFile, strategy: str, cell: Cell) -> tuple[int, int]:
    """The samples of one step of one replica, and the units of a sample. Raises UsageError."""
    known = choice(file, strategy).variables(cell)
    samples = formula.value(str(file.samples), known)
    if samples != cell.global_batch:
        raise UsageError(
            f"samples: a step has {samples} by the file, and {cell.global_batch} are planned: give what a "
            f"replica takes by --batch-size, and the parts of a sample by units_per_sample"
        )
    return cell.batch_per_replica, formula.value(str(file.units_per_sample), known)


def refused(file: ProgramFile, strategy: str, cell: Cell) -> str | None:
    """Why the file refuses a cell, as a sentence; None if it does not."""
    try:
        return next((f"{cell.workload}: {reason}" for reason in _refusals(file, strategy, cell)), None)
    except UsageError as error:
        return f"{cell.workload}: {error}"


def _refusals(file: ProgramFile, strategy: str, cell: Cell) -> Iterator[str]:
    chosen = choice(file, strategy)
    if chosen.text != cell.strategy:
        yield f"{cell.strategy} is {chosen.text} there"
    known = {**chosen.axes, **chosen.variables(cell)}
    for rule in file.impossible:
        if all(key == "reason" or known[key] == value for key, value in rule.items()):
            yield str(rule["reason"])
    words(file, strategy, cell)
    work(file, strategy, cell)
    for name, asked, passed in (
        ("batch_size", cell.batch_per_replica != file.default_batch, _BATCH),
        ("accumulation", cell.accumulation > 1, {"accumulation", "micro_batch"}),
        ("seed", cell.seed > 0, {"seed"}),
    ):
        if asked and not passed & chosen.used:
            yield f"no argument of {chosen.name} contains {{{name}}}, so the program would not get its value"


def interpreter(file: ProgramFile, folder: Path) -> list[str]:
    """The words before the script. Raises UsageError if the first is not found."""
    given = file.interpreter or sys.executable
    first, *others = (given,) if isinstance(given, str) else given
    # Links stay: an environment's Python finds its packages by the name that it is started by.
    found = shutil.which(folder.absolute() / first if "/" in first else first)
    if found is None:
        advice = "; write a command of several words as a list" if " " in first else ""
        raise UsageError(f"there is no program {first!r}, seen from {folder.absolute()} and on PATH{advice}")
    return [str(found), *others]


def digest(file: ProgramFile, folder: Path) -> str:
    """16 hex digits of a hash over what all strategies run, and over how their steps are counted.

    A module counts only if it lies in the folder. Raises UsageError for a file that cannot be read.
    """
    main = folder.joinpath(*str(file.module).split("."))
    modules = [path for path in (main.with_suffix(".py"), main / "__main__.py") if path.is_file()]
    sources = [folder / file.script] if file.script is not None else modules
    sources += chain.from_iterable(_matching(folder, glob) for glob in file.files)
    hashes = {os.path.relpath(path, folder): file_hash(path) for path in sources}
    # The other keys reach a program only through the axes of its cell.
    said = msgspec.structs.replace(file, batch=None, strategies={}, settings={}, impossible=())
    return _hash([said, hashes])[:16]


def _matching(folder: Path, glob: str) -> list[Path]:
    found = [path for path in folder.glob(glob) if path.is_file()]
    if not found:
        raise UsageError(f"no file in {folder} matches {glob!r}")
    return found


def _hash(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


Rule = tuple[str, object, str]
"""A key of the file, whether its rule is kept, and the error if it is not."""


def _check(file: ProgramFile, where: Where, *, folder: Path) -> None:
    for rules in (_command_rules, _log_rules, _axis_rules, _formula_rules, _impossible_rules):
        for key, holds, fault in rules(file, folder):
            if not holds:
                raise UsageError(f"{where(key)}: {fault}")


def _tried(key: str, call: Callable[..., object], *arguments: object, also: str = "") -> Rule:
    """The rule that a call raises no error, of which `also` is the end."""
    try:
        call(*arguments)
    except (UsageError, ValueError, NotImplementedError, re.error) as error:
        return key, False, f"{error}{also}"
    return key, True, ""


def _command_rules(file: ProgramFile, folder: Path) -> Iterator[Rule]:
    script = str(file.script)
    for key in ("script", "module", "interpreter"):
        value = getattr(file, key) or ()
        for word in (value,) if isinstance(value, str) else value:
            name = Path(word.partition(" ")[0]).name
            launches = f"{name} starts ranks, which bench does itself: name the script that it starts"
            yield key, not _LAUNCHERS.fullmatch(name), launches
    python = (folder / script).is_file() and not script.endswith(".sh")
    yield "script", file.module or python, f"{folder} has no Python file {script}"
    yield _tried("interpreter", interpreter, file, folder)
    for glob in file.files:
        yield _tried("files", _matching, folder, glob)
    for name in filter(lambda name: not _FREE.fullmatch(name), file.environment):
        yield _tried("environment", read_variables, f"{name}={file.environment[name]}", "it")


def _log_rules(file: ProgramFile, folder: Path) -> Iterator[Rule]:
    yield _tried("log", lambda: file.pattern, also=" of this regular expression")
    groups = {} if file.pattern is None else file.pattern.groupindex
    known = f"has no group (?P<step>...){nearest(str(file.log), LOGS)}; there are patterns {', '.join(LOGS)}"
    yield "log", file.log is None or groups, f"{file.log!r} {known}"
    yield "steps", file.steps != "log" or "step" in groups, f"log {known}"


def _axis_rules(file: ProgramFile, folder: Path) -> Iterator[Rule]:
    taken = {"strategy", "reason", "replica", *VARIABLES}
    for axis in taken & file.settings.keys():
        yield "settings", False, f"{axis} has another meaning: rename the setting"
    homes: dict[str, str] = {}
    for axis, each in file.axes.items():
        key = "strategies" if axis == "strategy" else "settings"
        yield key, each, f"{axis} takes NAME: ARGUMENTS"
        for name, line in each.items():
            parts = _parts(line)
            named = _NAME.fullmatch(axis) and _NAME.fullmatch(name)
            yield key, named, f"{name!r} of {axis!r} has a character other than letters, digits, _.-"
            yield from _part_rules(key, name, parts)
            for word in {*parts, *([name] if key == "settings" else ())} - {"arguments", "replica"}:
                home = homes.setdefault(word, axis)
                yield key, home == axis, f"{word!r} is named twice, in {home} and in {axis}: rename one"
    few = next(islice(names(file), _MOST_NAMES, None), None) is None
    yield "strategies", few, f"there are more than {_MOST_NAMES} strategies with settings; make several files"


def _part_rules(key: str, name: str, parts: Mapping[str, str | int]) -> Iterator[Rule]:
    for part, value in parts.items():
        text, replica = part == "arguments", (key, part) == ("strategies", "replica")
        takes = "a text; quote it" if text else "a whole number, of a replica at least 1"
        fits = isinstance(value, str) == text and (not replica or int(value) >= 1)
        yield key, fits, f"{name}: {part} takes {takes}, not {value!r}"
        free = _VARIABLE.fullmatch(part) and part not in (*VARIABLES, "replica")
        yield key, text or replica or free, f"{name}: {part} needs another name of a variable"


def _formula_rules(file: ProgramFile, folder: Path) -> Iterator[Rule]:
    for name in names(file):
        chosen = choice(file, name)
        formulas = [("samples", str(file.samples)), ("units_per_sample", str(file.units_per_sample))]
        for key, line in zip_longest(("arguments", "strategies"), chosen.lines, fillvalue="settings"):
            yield _tried(key, shlex.split, line)
            formulas += [(key, text) for text in _TEMPLATE.findall(line)]
        for key, text in formulas:
            known = (*VARIABLES, *chosen.declared)
            yield _tried(key, formula.names, text, known, also=f" (strategy {name})")
        stated = file.batch or _BATCH & chosen.used or not _BATCH & formula.names(str(file.samples))
        yield "strategies", stated, f"no argument of {name} contains {{batch_size}}; state it by batch: N"


def _impossible_rules(file: ProgramFile, folder: Path) -> Iterator[Rule]:
    for rule in file.impossible:
        yield "impossible", {"reason"} < rule.keys(), "a rule has a reason, and an axis such as strategy"
        for key, value in rule.items():
            yield _tried("impossible", _require, key, (*file.axes, *VARIABLES, "reason"), "axis")
            kind = str if key in ("reason", *file.axes) else int
            takes = f"{key} takes a {'text' if kind is str else 'whole number'}, not {value!r}"
            yield "impossible", isinstance(value, kind), takes
            if key in file.axes:
                yield _tried("impossible", _require, value, file.axes[key], key)
