"""Values as text of a manifest that every reader of YAML, and Kubernetes, takes for what they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"false", "n", "no", "null", "off", "on", "true", "y", "yes"}
"""Words that some version of YAML takes for something else than a text."""


def yaml_text(documents: Iterable[dict[str, Any]]) -> str:
    """The documents as one stream, each introduced by `---`."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, explicit_start=True, sort_keys=False, default_flow_style=False, width=10**9
    )


def unexpanded(text: str) -> str:
    """A value of `command` or `env` that stands for `text`: Kubernetes puts variables in for $(NAME).

    It reads $$ as a dollar sign, and leaves alone any that is followed by neither a dollar sign nor a
    parenthesis.
    """
    return re.sub(r"\$(?=[$(])", "$$", text)


class _Dumper(yaml.SafeDumper):
    """Texts in quotes wherever versions of YAML could differ on them: 1e3 is a number to one alone."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        # Lists are set in, as people write them.
        super().increase_indent(flow, False)


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text)
    style = "|" if text.endswith("\n") and text.isascii() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)
