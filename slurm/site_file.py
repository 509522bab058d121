"""Site profiles as YAML files, and with single values replaced: read strictly, with errors that help."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from results.errors import UsageError
from slurm.site import Container, GpuRequest, Price, SiteProfile, Times

_AT = re.compile(r"(?P<what>.*?)(?: - at `(?P<at>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`")
_PARTS = {"$": SiteProfile, "$.time": Times, "$.container": Container, "$.price": Price}


def read_site(path: Path) -> SiteProfile:
    """The profile in a YAML file.

    Raises UsageError: one line with the path, the offending key (`$.time.maximum`) or line, and the rule.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError as error:
        raise UsageError(f"there is no site profile {path}; docs/sites has examples") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a YAML file") from error
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise UsageError(f"{path}{line}: not readable as YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Bytes that are no text, dates that are none, a bottomless nesting.
        raise UsageError(f"{path}: not readable as YAML: {_one_line(str(error))}") from error
    return _converted(data, str(path))


def profile(data: object, where: str) -> SiteProfile:
    """The profile in plain data, such as a part of a JSON file. Raises UsageError that names `where`."""
    return _converted(data, where)


def override(site: SiteProfile, values: Mapping[str, object]) -> SiteProfile:
    """The profile with other values; None leaves a key as it is, and `time.fixed` is a key of a part.

    Raises UsageError as `read_site` does.
    """
    data = msgspec.to_builtins(site)
    for key, value in values.items():
        if value is not None:
            *parts, last = key.split(".")
            inner = data
            for part in parts:
                if not isinstance(inner.get(part), dict):
                    inner[part] = {}
                inner = inner[part]
            inner[last] = value
    return _converted(data, "options of the site")


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


def _converted(data: object, where: str) -> SiteProfile:
    try:
        return msgspec.convert(data, SiteProfile)
    except msgspec.ValidationError as error:
        match = _AT.fullmatch(str(error))
        assert match is not None
        explained = _explained(match["at"] or "$", _one_line(match["what"]), data)
        raise UsageError(f"{where}: {explained}") from error


def _explained(at: str, what: str, data: object) -> str:
    unknown = _UNKNOWN.fullmatch(what)
    if unknown is not None:
        known = _PARTS[at].__struct_fields__
        close = difflib.get_close_matches(unknown["key"], known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        return f"{at}.{unknown['key']} is not an option{hint}; there are: {', '.join(known)}"
    if not isinstance(data, dict):
        return "a site profile holds `option: value` lines, such as partition: gpu"
    if what.startswith("Invalid enum value"):
        what += f"; it is one of {', '.join(get_args(GpuRequest))}"
    if re.match(r"Expected `(bool \| )?str", what):
        # YAML makes numbers and truths of texts: account: 0123, NCCL_IB_DISABLE: no.
        what += "; quote it"
    return what if at == "$" else f"{_named(at, data)}: {what}"


def _named(at: str, data: Mapping[str, Any]) -> str:
    """The place of an error, with the key of a mapping in it, which msgspec leaves out."""
    place = at.removesuffix("[...]")
    if place == at:
        return at
    field = place.removeprefix("$.")
    allowed = (str, bool) if field == "directives" else (str,)
    return f"{place}.{next(key for key, value in data[field].items() if not isinstance(value, allowed))}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
