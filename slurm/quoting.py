"""Putting a value into a job script so that it is read back as it was written, or refusing it."""

from __future__ import annotations

import re
import shlex
import unicodedata

from results.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def directive(option: str, value: str | bool) -> str:
    """`--option="value"` as it stands after `#SBATCH`; quotes only where needed, a switch without a value.

    sbatch reads these lines by its own rules (get_argument in its opt.c), not by the shell's: a backslash
    escapes inside of both kinds of quotes, no variable is expanded, and a line always ends at its end. Raises
    UsageError for what such a line cannot carry.
    """
    if value is True:
        return f"--{option}"
    text = carried(str(value), f"Slurm's option {option}")
    if _PLAIN.fullmatch(text):
        return f"--{option}={text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{option}="{escaped}"'


def carried(text: str, what: str) -> str:
    """`text`, if one line of a script can hold it. Raises UsageError naming `what` if not."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs"):
            raise UsageError(f"{what} cannot hold the character {character!a} in {text!a}; leave it out")
    return text


def log_pattern(path: str) -> str:
    """The path as a file name pattern of Slurm that means just this path; raises UsageError if none does.

    A backslash anywhere turns the replacing of %j off (FILENAME PATTERN in sbatch's manual).
    """
    if "\\" in path:
        raise UsageError(f"Slurm writes no log to a path with a backslash: {path}; choose another folder")
    return path.replace("%", "%%")


def shell(text: str) -> str:
    """`text` as one word of the shell. Raises UsageError for characters that a script cannot hold."""
    for character in text:
        if character in "\0\r" or unicodedata.category(character) == "Cs":
            raise UsageError(f"a script cannot hold the character {character!a} in {text!a}; leave it out")
    return shlex.quote(text)
