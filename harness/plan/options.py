"""How the values of options are written, in a study file as on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, get_args

from msgspec import Meta

from results.cell import MemoryFormat, Precision
from results.errors import GpuCountsError, UsageError, nearest
from results.notation import gpu_counts, seconds_of
from results.plan import Scaling
from results.value_types import Written, bounds, literal_texts, notes, takes, within

MOST = 1_000_000_000
"""Larger whole numbers are typing errors, and some readers of JSON could not represent them."""
_BARE = re.compile(r"\s*\d+(\.\d+)?\s*", re.ASCII)
OF_A_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|(MASTER|TORCHELASTIC|PET|OMPI|PMI[2X]?)_.*"
)
"""A launcher sets these variables to give a process its rank. torchrun obeys some of them, and values that
another launcher or an operator left are wrong for the launch that torchrun starts."""
_OF_BENCH = re.compile(r"(OMP|MKL|OPENBLAS)_NUM_THREADS|PYTHON(PATH|SAFEPATH)|BENCH_.*|CUDA_VISIBLE_DEVICES")
"""bench sets these variables itself, or reads them."""
_SECRET_WORDS = {"TOKEN", "KEY", "SECRET", "PASSWORD"}
_SWITCHES = {"true": True, "false": False}
BATCH_AUTO = "auto"
"""The word that asks `--batch-size` for the largest batch that fits."""
CERTAIN = 0.95
"""The odds from which on `--until certain` takes a size as certain."""
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def read_names(value: str | list[str]) -> tuple[str, ...]:
    """The distinct names of a comma-separated string or a list, in the order given."""
    texts = value.split(",") if isinstance(value, str) else value
    return tuple(dict.fromkeys(text.strip() for item in texts for text in item.split(",") if text.strip()))


def read_counts(value: int | str | list[int | str], where: str, words: str = "") -> tuple[int, ...]:
    """The distinct whole numbers of a number, a comma text or a list. Raises UsageError."""
    items = value if isinstance(value, list) else [value]
    texts = [text.strip() for item in items for text in str(item).split(",")]
    for text in texts:
        if not re.fullmatch(r"[+-]?\d{1,30}", text, re.ASCII):
            raise UsageError(f"{where} takes {words or COUNTS.words}, such as 8,16, not {text!r}")
    return tuple(dict.fromkeys(int(text) for text in texts))


def read_batches(value: int | str | list[int | str], where: str) -> tuple[int, ...] | tuple[str]:
    """Return the numbers of `read_counts`, or the word auto by itself. Raises UsageError."""
    words = _texts(value)
    if words == [BATCH_AUTO]:
        return (BATCH_AUTO,)
    if BATCH_AUTO in words:
        raise UsageError(
            f"{where} takes {BATCHES.words}: leave auto out of {','.join(words)}, or the numbers"
        )
    return read_counts(value, where, BATCHES.words)


def read_gpus(value: int | str | list[int | str], where: str) -> tuple[int, ...]:
    """The counts of a number, a `1..256` text or a list of either. Raises GpuCountsError."""
    text = ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
    try:
        return gpu_counts(text)
    except GpuCountsError as error:
        raise GpuCountsError(str(error).replace("--gpus", where, 1)) from error


def read_duration_s(value: float | str, where: str, *, readings: str = "") -> float:
    """Seconds of a duration (`results.notation`) or of a number of seconds. Raises UsageError.

    A number without a unit is refused if `readings` names the units that could be meant, such as `ms`.
    """
    if not isinstance(value, str) or _BARE.fullmatch(value):
        if readings:
            number = value.strip() if isinstance(value, str) else f"{value:.15g}"
            named = " or ".join(f"{number}{unit} for {_UNITS[unit]}" for unit in readings)
            raise UsageError(f"{where} {number} has no unit: write {named}")
        return float(value)
    seconds = seconds_of(value)
    if seconds is None:
        raise UsageError(f"{where} takes {(JOB_TIME if readings else DURATION).words}, not {value!r}")
    return seconds


def read_odds(text: str, where: str) -> float:
    """The odds of `certain`, or of a number from 0.5 to 0.999. Raises UsageError."""
    if text == "certain":
        return CERTAIN
    try:
        odds = float(text)
    except ValueError:
        odds = 0.0
    if not 0.5 <= odds <= 0.999:
        raise UsageError(f"{where} takes certain, or odds from 0.5 to 0.999, not {text!r}")
    return odds


def read_job_time_s(value: float | str, where: str) -> float:
    """Seconds of a job's time limit, of which Slurm reads a bare number as minutes. Raises UsageError."""
    return read_duration_s(value, where, readings="ms")


def _worded(
    words: str, answers: Mapping[str, object], other: Callable[[str], object] | None = None
) -> Callable[[Any, str], tuple[Any, ...]]:
    """Make a reader of the distinct values of a comma text or a list. `answers` has the value of a word, and
    `other` reads any other text. The reader raises UsageError with these words."""

    def read(value: object, where: str) -> tuple[Any, ...]:
        found = []
        for text in _texts(value):
            try:
                found.append(answers[text] if other is None or text in answers else other(text))
            except (KeyError, ValueError):
                raise UsageError(f"{where} takes {words}, not {text!r}{nearest(text, answers)}") from None
        return tuple(dict.fromkeys(found))

    return read


def read_variables(value: str | list[str], where: str) -> tuple[tuple[str, ...], ...]:
    """Return every combination of the values of environment variables; one is `NAME=VALUE` items by name.

    A name that is given several times has several values; a value is not split. Raises UsageError for a text
    without a name, for variables that bench or a launcher sets, and for names of secrets, which would be
    stored with the study.
    """
    values: dict[str, dict[str, None]] = {}
    for text in value if isinstance(value, list) else [value]:
        name, equals, _ = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not text.isprintable():
            raise UsageError(f"{where} takes {VARIABLES.words}, such as NCCL_ALGO=Ring, not {text!r}")
        if OF_A_LAUNCHER.fullmatch(name) or _OF_BENCH.fullmatch(name):
            raise UsageError(f"{where} cannot set {name}: bench or the launcher sets it for each rank")
        if any(word in _SECRET_WORDS for word in name.upper().split("_")):
            raise UsageError(
                f"{where} {name}: a study stores its variables, and this name may be a secret's; set it "
                f"in the environment of bench, which the ranks inherit"
            )
        values.setdefault(name, {})[text] = None
    return tuple(product(*(values[name] for name in sorted(values))))


def _texts(value: object) -> list[str]:
    """Split a value (a comma-separated string or a list) into words in lower case."""
    items = value if isinstance(value, list) else [value]
    return [text.strip().lower() for item in items for text in str(item).split(",") if text.strip()]


@dataclass(frozen=True, slots=True)
class Kind(Written):
    """A way to write values: its words in errors, its placeholder in --help, its reader."""

    metavar: str | None = None
    """None: click's own."""
    flag_type: type[str | int | float | bool] = str
    """The type to which click converts a flag's value."""
    items: Callable[[Any, str], Sequence[Any]] = lambda value, where: (value,)
    """Returns the items of a value that bounds and choices apply to; empty for none. Raises UsageError."""
    choices: tuple[str, ...] = ()
    bare: bool = False
    """Whether its flag without a value means true, and `--no-` before its name means false."""
    repeated: bool = False
    """Whether its flag may be given several times, each with one item."""


NAMES = Kind("names joined by commas, or a list", "NAME,...", str, lambda value, where: read_names(value))
COUNTS = Kind("whole numbers joined by commas", "N,...", str, read_counts)
BATCHES = Kind("auto, or whole numbers joined by commas", "N,...", str, read_batches)
GPUS = Kind("counts and ranges such as 1..8, joined by commas", "COUNTS", str, read_gpus)
DURATION = Kind(
    "seconds or a time like 90s, 1h30m, 2d or 1:30:00",
    "TIME",
    str,
    lambda value, where: (read_duration_s(value, where),),
)
JOB_TIME = Kind(
    "a time like 90s, 1h30m, 2d or 1:30:00",
    "TIME",
    str,
    lambda value, where: (read_job_time_s(value, where),),
)
TEXT = Kind("a text", "TEXT", str, lambda value, where: (value,) if value.strip() else ())
PRECISIONS = Kind("fp32, tf32, bf16, fp16 or float8", "NAME,...", str, NAMES.items, get_args(Precision))
MEMORY_FORMATS = Kind("contiguous or channels_last", "NAME,...", str, NAMES.items, get_args(MemoryFormat))
SWITCHES = Kind("true or false", "BOOL,...", str, _worded("true or false", _SWITCHES), bare=True)
_KINDS = "all (true), none (false) or selective"
_ANSWERS = {**_SWITCHES, "all": True, "none": False, "selective": "selective"}
CHECKPOINTINGS = Kind(_KINDS, "BOOL,...", str, _worded(_KINDS, _ANSWERS), bare=True)
VARIABLES = Kind("NAME=VALUE", "NAME=VALUE", str, read_variables, repeated=True)
_LIMIT = _worded("a number or none, such as none,1.0", {"none": None}, float)
LIMITS = Kind("a number or none", "X,...", str, _LIMIT)
SCALINGS = Kind("weak, strong or both", "NAME,...", str, NAMES.items, get_args(Scaling))


def _joined(*choices: str) -> Meta:
    """The JSON Schema's pattern for choices joined by commas."""
    one = f"\\s*({'|'.join(choices)})\\s*"
    return Meta(extra_json_schema={"pattern": f"^{one}(,{one})*$"})


Names = Annotated[str | list[str] | None, NAMES]
Counts = Annotated[int | str | list[int | str] | None, COUNTS]
Batches = Annotated[int | str | list[int | str] | None, BATCHES]
Gpus = Annotated[int | str | list[int | str] | None, GPUS]
Precisions = Annotated[str | list[str] | None, PRECISIONS, _joined(*PRECISIONS.choices)]
MemoryFormats = Annotated[str | list[str] | None, MEMORY_FORMATS, _joined(*MEMORY_FORMATS.choices)]
Switches = Annotated[bool | str | list[bool | str] | None, SWITCHES, _joined("true", "false")]
Checkpointings = Annotated[
    bool | str | list[bool | str] | None, CHECKPOINTINGS, _joined("true", "false", "all", "none", "selective")
]
Variables = Annotated[str | list[str] | None, VARIABLES]
Limits = Annotated[float | str | list[float | str] | None, LIMITS]
Scalings = Annotated[str | list[str] | None, SCALINGS]
Duration = Annotated[float | str | None, DURATION]
JobTime = Annotated[
    float | str | None, JOB_TIME, Meta(extra_json_schema={"not": {"type": "number"}, "pattern": "[smhd:-]"})
]
Text = Annotated[str | None, TEXT]
Whole = Annotated[int | None, Kind("a whole number", "N", int)]
Number = Annotated[float | None, Kind("a number", "X", float)]
Switch = Annotated[bool | None, Kind("true or false", flag_type=bool)]


def option(
    help: str, *, ge: float | None = None, gt: float | None = None, le: float = MOST, heading: str = ""
) -> Meta:
    """Declare an option: its meaning, and the bounds of its numbers if `ge` or `gt` gives one.

    With `heading`, it and the options after it are listed under that heading. `[=VALUE]` at the end of the
    meaning is its default, as one would write it, or what decides it in parentheses.
    """
    meaning, _, default = help.removesuffix("]").partition(" [=")
    rule = {} if ge is gt else {"minimum": ge, "exclusiveMinimum": gt, "maximum": le}
    schema = {name: v for name, v in rule.items() if v is not None}
    return Meta(description=meaning, extra_json_schema=schema, extra={"heading": heading, "default": default})


COMMON = object()
"""Annotates the options that `--help` shows; `--help-all` shows every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOption:
    """An option as the field of its struct declares it: `name` is its key, and with dashes its flag."""

    name: str
    type: Any
    """The annotated type of its values."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        return self._declared.description or ""

    @property
    def heading(self) -> str:
        """The heading that begins with this option; empty if it is under the heading of an earlier option."""
        return str(self._extra["heading"])

    @property
    def default(self) -> str:
        """The default as one would write it, what decides it in parentheses, or nothing."""
        return str(self._extra["default"])

    @property
    def common(self) -> bool:
        return COMMON in notes(self.type)

    @property
    def _extra(self) -> dict[str, Any]:
        return self._declared.extra or {}

    @property
    def _declared(self) -> Meta:
        return next(note for note in notes(self.type) if isinstance(note, Meta) and note.description)

    @property
    def kind(self) -> Kind:
        written = (note for note in notes(self.type) if isinstance(note, Kind))
        return next(written, Kind(takes(self.type), choices=literal_texts(self.type)))

    def check(self, value: object, where: str) -> None:
        """Check a value of the right type against its rule. Raises UsageError that names `where`."""
        kind, limits = self.kind, bounds(self.type)
        items = kind.items(value, where)
        if not items:
            raise UsageError(f"{where} is empty; pass a value or omit it")
        for item in items:
            # None means unlimited, and a word has no bounds.
            outside = bool(limits) and isinstance(item, int | float) and not within(limits, item)
            if outside or (kind.choices and item not in kind.choices):
                given = value if kind in (DURATION, JOB_TIME) else item
                near = nearest(str(item), kind.choices)
                raise UsageError(f"{where} takes {takes(self.type)}, not {given!r}{near}")
