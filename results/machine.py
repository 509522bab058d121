"""The machine that figures were measured on: what names it, among the facts of a subject."""

from __future__ import annotations

import re
from collections.abc import Mapping

MODEL = ("device_name", "cpu_model")
"""Facts that name the model of a machine, the first that is known."""


def machine_model(facts: Mapping[str, str]) -> str | None:
    """The model that facts of a subject name; None if they name none, as for an empty baseline."""
    return next((facts[fact] for fact in MODEL if fact in facts), None)


def file_word(model: str, longest: int) -> str:
    """A model as a part of a file's name, of so many characters at most: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:longest].strip("-")
