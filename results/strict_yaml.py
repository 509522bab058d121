"""YAML files as typed values: read strictly, with errors that help."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml

from results.errors import UsageError

T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(r"(?P<what>.*?)(?: - at `(?P<at>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<field>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind(Generic[T]):
    """A kind of YAML file: what it holds, and how errors speak of it."""

    type: type[T]
    name: str
    """Such as `site profile`."""
    example: str
    """A line of one."""
    advice: str
    """Where to look if there is no such file."""

    def read(self, path: Path) -> T:
        """The value in a file.

        Raises UsageError: one line with the path, the offending key (`$.time.maximum`) or line, and the rule.
        """
        try:
            data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        except FileNotFoundError as error:
            raise UsageError(f"there is no {self.name} {path}; {self.advice}") from error
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; name a YAML file") from error
        except yaml.MarkedYAMLError as error:
            line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
            raise UsageError(f"{path}{line}: not readable as YAML: {error.problem}") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            # Bytes that are no text, dates that are none, a bottomless nesting.
            raise UsageError(f"{path}: not readable as YAML: {_one_line(str(error))}") from error
        return self.converted(data, str(path))

    def converted(self, data: object, where: str) -> T:
        """The value in plain data, such as a part of a JSON file. Raises UsageError that names `where`."""
        try:
            return msgspec.convert(data, self.type)
        except msgspec.ValidationError as error:
            match = _AT.fullmatch(str(error))
            assert match is not None
            explained = self._explained(match["at"] or "$", _one_line(match["what"]), data)
            raise UsageError(f"{where}: {explained}") from error

    def overridden(self, value: T, changes: Mapping[str, object], where: str) -> T:
        """The value with other values of its keys; None leaves one as it is. `time.fixed` is one of a part.

        Raises UsageError that names `where`.
        """
        data = msgspec.to_builtins(value)
        for key, change in changes.items():
            if change is not None:
                *parts, last = key.split(".")
                inner = data
                for part in parts:
                    if not isinstance(inner.get(part), dict):
                        inner[part] = {}
                    inner = inner[part]
                inner[last] = change
        return self.converted(data, where)

    def _explained(self, at: str, what: str, data: object) -> str:
        unknown = _UNKNOWN.fullmatch(what)
        if unknown is not None:
            known = _struct(self._expected(at)).__struct_fields__
            close = difflib.get_close_matches(unknown["key"], known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            return f"{at}.{unknown['key']} is not an option{hint}; there are: {', '.join(known)}"
        if not isinstance(data, dict):
            return f"a {self.name} holds `option: value` lines, such as {self.example}"
        if what.startswith("Invalid enum value"):
            what += f"; it is one of {', '.join(_choices(self._expected(at)))}"
        if re.match(r"Expected `(bool \| )?str", what):
            # YAML makes numbers and truths of texts: account: 0123, NCCL_IB_DISABLE: no.
            what += "; quote it"
        return what if at == "$" else f"{self._named(at, data)}: {what}"

    def _expected(self, at: str) -> Any:
        """The type of what is at a place, such as `$.time.maximum` or `$.directives[...]`."""
        expected: Any = self.type
        for step in _STEP.finditer(at):
            if step["field"] is None:
                expected = _element(expected)
            else:
                fields = {field.name: field.type for field in msgspec.structs.fields(_struct(expected))}
                expected = fields[step["field"]]
        return expected

    def _named(self, at: str, data: Any) -> str:
        """The place of an error, with the key of a mapping in it, which msgspec leaves out."""
        place = at.removesuffix("[...]")
        if place == at:
            return at
        for step in _STEP.finditer(place):
            data = data[int(step["index"]) if step["field"] is None else step["field"]]
        return (
            f"{place}.{next(key for key, value in data.items() if not isinstance(value, self._expected(at)))}"
        )


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error, instead of winning silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"{_one_line(key.value)} is given twice; keep one"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _alternatives(expected: Any) -> Iterator[Any]:
    """A type and, of a union, its members."""
    yield expected
    yield from get_args(expected)


def _struct(expected: Any) -> type[msgspec.Struct]:
    return next(
        part
        for part in _alternatives(expected)
        if isinstance(part, type) and issubclass(part, msgspec.Struct)
    )


def _element(expected: Any) -> Any:
    """What a mapping or a tuple of any length holds."""
    return next(part for part in reversed(get_args(expected)) if part is not ...)


def _choices(expected: Any) -> list[str]:
    literals = (part for part in _alternatives(expected) if get_origin(part) is Literal)
    return [choice for literal in literals for choice in get_args(literal)]


def _one_line(text: str) -> str:
    return " ".join(text.split())
