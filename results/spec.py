"""`name[:positional][:key=value]...`: one way to write a workload, a strategy, a compressor, a data set.

A catalog declares what exists and which options each entry takes; parsing a text against it gives typed
values and one canonical text, in which options at their default are left out, so that an option added
later does not rename the cells of old studies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from threading import RLock
from types import MappingProxyType
from typing import Literal

from results.errors import ExtensionError, SpecError, nearest
from results.extensions import GROUPS, Extension, extensions

Value = int | float | bool | str
Kind = Literal["int", "float", "bool", "str"]
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a catalog entry, or its positional."""

    kind: Kind
    help: str
    default: Value | None = None
    """None: a positional must be given, and an option that is not given is absent."""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    example: str | None = None
    """A value that an error shows when it is missing."""
    canonical: Callable[[str], str] | None = None
    """Converts a value with a special grammar to its one canonical form; raises SpecError."""
    tuned: tuple[str, ...] = ()
    """The values that `bench tune` tries by default, the default of the option first. None of them changes
    what is learnt: a strategy's `differences` name the options that do."""

    def read(self, text: str, where: str) -> Value:
        """The typed value of `text`; raises SpecError naming `where`."""
        try:
            value = _CONVERT[self.kind](text)
        except (ValueError, KeyError):
            share = re.fullmatch(r"(\d+(?:\.\d+)?)%", text) if self.kind == "float" else None
            meant = f" (did you mean {float(share[1]) / 100:g}?)" if share else ""
            raise SpecError(f"{where} takes {_KIND_TEXT[self.kind]}, not {text!r}{meant}") from None
        if self.canonical is not None:
            value = self.canonical(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{where} is a finite number, not {text}")
        if self.choices and value not in self.choices:
            raise SpecError(f"{where} is one of {', '.join(self.choices)}, not {text!r}")
        if self.minimum is not None and not isinstance(value, str) and not value >= self.minimum:
            raise SpecError(f"{where} is at least {self.minimum:g}, not {text}")
        if self.maximum is not None and not isinstance(value, str) and not value <= self.maximum:
            raise SpecError(f"{where} is at most {self.maximum:g}, not {text}")
        return value


_KIND_TEXT = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


_CONVERT: Mapping[Kind, Callable[[str], Value]] = MappingProxyType(
    {"int": int, "float": float, "bool": lambda text: _BOOLS[text.lower()], "str": str}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a catalog."""

    name: str
    help: str
    positional: Option | None = None
    options: Mapping[str, Option] = field(default_factory=lambda: MappingProxyType({}))
    alias_of: str | None = None
    """The canonical spec text that this name is an alias of."""


def require_options(entry: Entry) -> None:
    """Raise TypeError if an option of an entry, or its help, has the wrong type."""
    options = {"positional": entry.positional, **entry.options}
    for name, option in options.items():
        if not (isinstance(option, Option) or (name == "positional" and option is None)):
            raise TypeError(f"its option {name!r} is {option!r}, and must be a results.spec.Option")
    if not isinstance(entry.help, str):
        raise TypeError(f"its help is {entry.help!r}, and must be a text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parsed spec: its name, its positional and all options, with defaults."""

    name: str
    positional: Value | None
    options: Mapping[str, Value | None]
    text: str
    """The canonical form: equal specs have equal text."""

    @property
    def ratio(self) -> float:
        """The positional, where it is a number."""
        assert isinstance(self.positional, float)
        return self.positional

    @property
    def count(self) -> int:
        """The positional, where it is a whole number."""
        assert isinstance(self.positional, int)
        return self.positional

    def integer(self, key: str) -> int:
        value = self.options[key]
        assert isinstance(value, int)
        return value

    def number(self, key: str) -> float:
        value = self.options[key]
        assert isinstance(value, float)
        return value

    def word(self, key: str) -> str:
        value = self.options[key]
        assert isinstance(value, str)
        return value

    def flag(self, key: str) -> bool:
        value = self.options[key]
        assert isinstance(value, bool)
        return value


class Catalog:
    """The entries of one kind ("strategy", "workload"), and the parser of their specs."""

    def __init__(
        self, kind: str, entries: list[Entry], *, packaged: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`kind`: a noun; other packages add members if it is one of `GROUPS`. `packaged`: names that known
        packages add, each with the command that installs its package."""
        self.kind = kind
        self._packaged = packaged
        self._offered: Mapping[str, Extension] | None = None
        self._entries: dict[str, Entry] = {}
        for entry in entries:
            self.add(entry)
        # Two threads that name another package's strategy must not both register it.
        self._parsing = RLock()
        # A matrix names the same few texts in each of its thousands of cells.
        self._parsed: dict[str, Spec] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    @property
    def entries(self) -> dict[str, Entry]:
        """All entries by name."""
        return self._entries

    @property
    def names(self) -> Collection[str]:
        """The names of all entries."""
        return self._entries

    def entry(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def add(self, entry: Entry) -> None:
        """Raises SpecError if the name is taken."""
        if entry.name in self._entries:
            taken = self._entries[entry.name].help
            raise SpecError(f"{self.kind} {entry.name!r} is declared already ({taken}); choose another name")
        self._entries[entry.name] = entry

    @property
    def offered(self) -> Mapping[str, Extension]:
        """Extensions of other packages, by name. Raises ExtensionError for a name that is taken."""
        if self._offered is None:
            self._offered = extensions(self.kind, self.names) if self.kind in GROUPS else {}
        return self._offered

    @property
    def absent(self) -> Mapping[str, str]:
        """Names of known packages that are not installed, each with a predicate that names the command."""
        return {
            name: f"is in a package that is not installed; install it: {command}"
            for name, command in self._packaged.items()
            if name not in self.offered and name not in self.names
        }

    def admit(self, extension: Extension) -> None:
        """Import and register what another package adds. Raises ExtensionError if it is not of this kind."""
        raise NotImplementedError

    def admit_all(self) -> dict[str, ExtensionError]:
        """Import and register what other packages add. Returns the errors by the names that cannot be."""
        failed = {}
        for name, extension in self.offered.items():
            if name not in self.names:
                try:
                    self.admit(extension)
                except ExtensionError as error:
                    failed[name] = error
        return failed

    def parse(self, text: str) -> Spec:
        """The spec that `text` names. Raises SpecError, which lists what exists and the nearest name.

        What another package adds is imported when it is first named. Raises ExtensionError if it cannot be.
        """
        if text not in self._parsed:
            with self._parsing:
                self._parsed[text] = self._parse(text)
        return self._parsed[text]

    def _parse(self, text: str) -> Spec:
        name, positional, options = split(text)
        offered = self.offered.get(name)
        if offered is not None and name not in self.names:
            self.admit(offered)
        entry = self.entry(name)
        if entry is None:
            raise SpecError(self._unknown(name))
        if entry.alias_of is None:
            return self._build(entry, positional, options)
        if positional is not None:
            raise SpecError(f"{self.kind} {text!r}: {entry.name} takes no {positional!r}")
        name, base_positional, base_options = split(entry.alias_of)
        aliased = self.entry(name)
        assert aliased is not None
        return self._build(aliased, base_positional, base_options | options)

    def _build(self, entry: Entry, positional: str | None, options: dict[str, str]) -> Spec:
        value = self._positional(entry, positional)
        unknown = [key for key in options if key not in entry.options]
        if unknown:
            known = ", ".join(sorted(entry.options)) or "none"
            raise SpecError(
                f"{self.kind} {entry.name} has no option {unknown[0]!r}{nearest(unknown[0], entry.options)};"
                f" its options: {known}"
            )
        values = {
            key: option.read(options[key], f"{self.kind} {entry.name}: {key}")
            if key in options
            else option.default
            for key, option in entry.options.items()
        }
        return Spec(
            name=entry.name,
            positional=value,
            options=MappingProxyType(values),
            text=_canonical(entry, value, values),
        )

    def _positional(self, entry: Entry, text: str | None) -> Value | None:
        if entry.positional is None:
            if text is not None:
                raise SpecError(f"{self.kind} {entry.name} takes no {text!r}; options are written key=value")
            return None
        if text is not None:
            return entry.positional.read(text, f"{self.kind} {entry.name}")
        if entry.positional.default is None:
            example = f"{entry.name}:{entry.positional.example or '...'}"
            raise SpecError(f"{self.kind} {entry.name} needs {entry.positional.help}: write {example}")
        return entry.positional.default

    def _unknown(self, name: str) -> str:
        if name in self.absent:
            return f"{self.kind} {name!r} {self.absent[name]}"
        names = sorted({*self.names, *self.offered})
        near = nearest(name, (*names, *self.absent))
        return f"there is no {self.kind} {name!r}{near}; there are: {', '.join(names)}"


def split(text: str) -> tuple[str, str | None, dict[str, str]]:
    """The raw parts of a spec text: name, positional (all up to the first `key=value`), options."""
    name, *parts = text.strip().split(":")
    first_option = next((i for i, part in enumerate(parts) if "=" in part), len(parts))
    positional = ":".join(parts[:first_option]) if first_option else None
    options: dict[str, str] = {}
    for part in parts[first_option:]:
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise SpecError(f"{text!r}: {part!r} is not key=value, and options come last")
        if key in options:
            raise SpecError(f"{text!r} gives {key} twice")
        options[key] = value
    return name, positional, options


def _canonical(entry: Entry, positional: Value | None, values: Mapping[str, Value | None]) -> str:
    parts = [entry.name]
    if entry.positional is not None and positional != entry.positional.default:
        parts.append(_text(positional))
    parts += [
        f"{key}={_text(value)}"
        for key, value in sorted(values.items())
        if value is not None and value != entry.options[key].default
    ]
    return ":".join(parts)


def _text(value: Value | None) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
