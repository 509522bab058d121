"""YAML files as typed values, read strictly, with errors that say where, what is allowed, and what to type.

PyYAML's nodes have the line and the source text of every value; the data that it constructs does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Generic, NoReturn, TypeVar, get_args, get_origin

import msgspec
import yaml

from results import files
from results.errors import UsageError, nearest
from results.value_types import alternatives, takes

T = TypeVar("T", bound=msgspec.Struct)
Keys = Sequence[str | int]
"""The way to a value: keys of mappings and indices of lists."""
Where = Callable[[str], str]
"""The place of an option, in words: its file, line and key, or its flag."""

DEEPEST = 8
"""Levels of mappings and lists; the deepest type has four."""
_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<at>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<field>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<key>.*)`")
_SURPRISING = re.compile(r"[-+]?(0[0-7_]+|0[xb][0-9a-fA-F_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML 1.1 reads differently from their writer: 010 is 8, 1:30 is 90."""
_NESTED = re.compile(r"(?P<head>[\s-]*[\w-]+:\s+)(?P<value>[^#]*[^#\s])")
_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind(Generic[T]):
    """A kind of YAML file: its type, and its name and advice in errors."""

    type: type[T]
    name: str
    """The name in errors, such as `site profile`."""
    example: str
    """An example of a line of such a file."""
    advice: str
    """Advice where the file is missing."""
    check: Callable[[T, Where], None] = lambda value, where: None
    """Rules beyond the types. Raises UsageError."""

    def read(self, path: Path) -> T:
        """The value in a file.

        Raises UsageError: one line with path, line, key (`time.maximum`), what was given and what is allowed.
        """
        try:
            text = files.read(path, most=files.YAML_BYTES).data.decode()
        except FileNotFoundError as error:
            raise UsageError(f"there is no {self.name} {path}; {self.advice}") from error
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; name a YAML file") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8 text (byte {error.start}); name a YAML file") from error
        data, root = _parsed(text, path)
        return self._value(data, _Source(str(path), root))

    def converted(self, data: object, where: str) -> T:
        """The value in plain data, such as a part of a JSON file. Raises UsageError that names `where`."""
        return self._value(data, _Source(where, None))

    def overridden(self, value: T, changes: Mapping[str, object], where: str) -> T:
        """The value with changed keys; a change to None has no effect. `time.fixed` is a key of a part.

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

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of such a file, for editors."""
        dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        return dialect | msgspec.json.schema(self.type)

    def _value(self, data: object, source: _Source) -> T:
        try:
            value = msgspec.convert(data, self.type)
        except msgspec.ValidationError as error:
            match = _MESSAGE.fullmatch(str(error))
            assert match is not None
            raise UsageError(self._explained(match["what"], match["at"] or "", data, source)) from error
        self.check(value, lambda name: source.place([name]))
        return value

    def _explained(self, what: str, at: str, data: object, source: _Source) -> str:
        keys, hint, given = _followed(at, self.type, data)
        place = source.place(keys)
        if (unknown := _UNKNOWN.fullmatch(what)) is not None:
            key, known = unknown["key"], _struct(hint).__struct_fields__
            place = source.place([*keys, key])
            return f"{place} is not an option{nearest(key, known)}; there are: {', '.join(known)}"
        if (missing := _MISSING.fullmatch(what)) is not None:
            return f"{place}: {missing['key']} is missing"
        if not what.startswith(("Expected", "Invalid enum value")):
            # A rule of the type's own, which may begin with the key that breaks it.
            key, _, rule = what.partition(": ")
            if isinstance(given, dict) and key in given:
                place, what = source.place([*keys, key]), rule
            return f"{place}: {_one_line(what)}"
        text = source.text(keys, given)
        if not keys:
            return f"{place}: a {self.name} holds `option: value` lines, such as {self.example}, not {text}"
        return f"{place} takes {takes(hint)}, not {text}{_advice(hint, given, text)}"


def _struct(hint: Any) -> type[msgspec.Struct]:
    return next(
        kind for kind in alternatives(hint) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    )


def _followed(at: str, hint: Any, data: Any) -> tuple[list[str | int], Any, Any]:
    """The keys, the type and the value at a place as msgspec names it, such as `.time.maximum`."""
    keys: list[str | int] = []
    for step in _STEP.finditer(at):
        key: str | int
        if step["field"] is not None:
            key = step["field"]
            hint = next(field.type for field in msgspec.structs.fields(_struct(hint)) if field.name == key)
        else:
            # The type of the elements of a list or a mapping.
            holder = next(kind for kind in alternatives(hint) if get_origin(kind) in (list, tuple, dict))
            hint = next(part for part in reversed(get_args(holder)) if part is not ...)
            key = int(step["index"]) if step["index"] else _misfit(data, hint)
        keys.append(key)
        data = data[key]
    return keys, hint, data


def _misfit(mapping: Mapping[str, object], hint: Any) -> str:
    """The first key whose value does not have the type: msgspec's message does not name it."""
    for key, value in mapping.items():
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            return key
    raise AssertionError(f"all values are {hint}")


def _advice(hint: Any, given: object, text: str) -> str:
    """Advice where YAML, or the author of the file, confused a string and a number."""
    kinds = set(alternatives(hint))
    # If a list is allowed too, a string holds several values, so the value of a switch cannot be a string.
    switches = bool in kinds and any(get_origin(kind) is list for kind in kinds)
    if str in kinds and not switches and not kinds & {int, float}:
        if isinstance(given, dict) and len(given) == 1:
            # compression: {topk: 0.01}
            text = ":".join(str(part) for pair in given.items() for part in pair)
        return "" if isinstance(given, list | NoneType) else f"; quote it: {_quoted(text)}"
    try:
        value = msgspec.convert(given, hint, strict=False) if isinstance(given, str) else None
    except msgspec.ValidationError:
        value = None
    return "" if value is None else f"; write {yaml.safe_dump(value).splitlines()[0]}"


class _Source:
    """The source of data: a file with its nodes, or only a name."""

    def __init__(self, name: str, root: yaml.Node | None) -> None:
        self._name = name
        self._root = root

    def place(self, keys: Keys) -> str:
        """The place of a value, such as `study.yaml, line 7: exclude[0].gpus`."""
        node, line = self._found(keys)
        name = self._name if node is None or not keys else f"{self._name}, line {line}"
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
        return f"{name}: {_one_line(path.removeprefix('.'))}" if keys else name

    def text(self, keys: Keys, given: object) -> str:
        """The text of a value as it is in its file."""
        if isinstance(given, dict):
            return "a mapping"
        if isinstance(given, list | tuple):
            return "a list"
        if given is None:
            return "nothing"
        node, _ = self._found(keys)
        return node.value if isinstance(node, yaml.ScalarNode) and not isinstance(given, str) else repr(given)

    def _found(self, keys: Keys) -> tuple[yaml.Node | None, int]:
        """The node of a value, and the line of its key."""
        node, line = self._root, 1
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                # Keys of `<<` come first, and keys of the mapping itself override them.
                name, node = next(pair for pair in reversed(node.value) if pair[0].value == key)
                line = name.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode):
                node = node.value[key]
                line = node.start_mark.line + 1
        return node, line


def _parsed(text: str, path: Path) -> tuple[object, yaml.Node | None]:
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return (None if root is None else loader.construct_document(root)), root
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        # For a missing closing bracket or quote YAML marks the line after the last one: use the last line.
        line = 0 if mark is None else min(mark.line, text.rstrip().count("\n"))
        problem = (
            str(error.problem) if isinstance(error, _Refusal) else f"not readable as YAML: {error.problem}"
        )
        advice = _colon_advice(text.splitlines()[line]) if "mapping values" in problem else ""
        raise UsageError(f"{path}, line {line + 1}: {_one_line(problem)}{advice}") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n")
        raise UsageError(f"{path}, line {line + 1}: not readable as YAML: {error.reason}") from error
    except ValueError as error:
        # Python refuses to make whole numbers of thousands of digits.
        raise UsageError(f"{path} has a number of too many digits; shorten it, or quote a text") from error


def _colon_advice(line: str) -> str:
    """Advice on `compression: topk: 0.01`, which is a mapping in a mapping to YAML."""
    match = _NESTED.fullmatch(line)
    return "" if match is None else "; quote it: " + _quoted(re.sub(r":\s+", ":", match["value"]))


class _Refusal(yaml.MarkedYAMLError):
    """An error for a document that YAML would accept silently."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses what PyYAML accepts silently: duplicate keys, 1:30 as 90, deep nesting."""

    _depth = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        # Dates are strings, as in YAML 1.2.
        return _TEXT if tag == "tag:yaml.org,2002:timestamp" else tag

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(f"the tag {tag} has no use here; leave it out, and quote strings", event)
        if self._depth > DEEPEST:
            self._refuse("nested deeper than any option is", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        number = isinstance(node, yaml.ScalarNode) and node.tag != _TEXT
        if number and isinstance(event, yaml.ScalarEvent) and _SURPRISING.fullmatch(event.value):
            self._refuse(
                f"YAML reads {event.value} as another number (a leading 0 is octal or hex, colons are "
                f"base 60); write a decimal number, or quote it: {_quoted(event.value)}",
                event,
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.tag not in (_TEXT, _MERGE):
                advice = f"; quote it: {_quoted(key.value)}" if isinstance(key, yaml.ScalarNode) else ""
                self._refuse(f"a key must be a text{advice}", key)
            if key.value in seen:
                self._refuse(f"{key.value} is given twice; keep one", key)
            seen.add(key.value)
        return node

    def _refuse(self, problem: str, at: Any) -> NoReturn:
        raise _Refusal(problem=problem, problem_mark=at.start_mark)


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style="'", width=10**9).strip()


def _one_line(text: str) -> str:
    return " ".join(text.split())
