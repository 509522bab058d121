"""The errors a user can meet, each one line that says what was given, what is allowed, and what to do.

::

    BenchError                exit code 1
    +-- UsageError            2: the call is wrong
    |   +-- SpecError         a name or an option that does not exist
    |   +-- GpuCountsError    a GPU count that does not parse
    +-- StoreError            1: a file or folder of a study cannot be read or written
    |   +-- SchemaError       a file that is damaged or not what it should be
    |   |   +-- NewerSchemaError  ... or newer than this program
    |   +-- StudyBusyError    another process works on the study
    |       +-- NightBusyError  4: ... or another night of bench matrix --fresh measures on this host
    +-- MachineError          1: this machine cannot do what was asked
    +-- ExtensionError        1: a name that another package adds cannot be used
    +-- SchedulerError        1: a cluster's scheduler refused, failed or did not answer
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable


class BenchError(Exception):
    """An error with a message meant for the user; anything else is a defect of this program."""

    exit_code = 1


class UsageError(BenchError):
    """The call is wrong: nothing ran, nothing was written."""

    exit_code = 2


class SpecError(UsageError):
    """A `name:positional:key=value` text names something that does not exist."""


class GpuCountsError(UsageError):
    """A `--gpus` text that does not parse."""


class StoreError(BenchError):
    """A file or a folder of a study cannot be read or written."""


class SchemaError(StoreError):
    """A file is damaged, of another kind, or in a place that is not its own."""


class NewerSchemaError(SchemaError):
    """A file was written by a newer version of this program."""


class StudyBusyError(StoreError):
    """Another process plans, runs or submits in the same study."""


class NightBusyError(StudyBusyError):
    """Another night (`bench matrix --fresh`) has not ended."""

    exit_code = 4


class MachineError(BenchError):
    """This machine cannot do what was asked (no torch, no such device, no room)."""


class ExtensionError(BenchError):
    """What another package adds cannot be imported, or is not what it must be."""


class SchedulerError(BenchError):
    """A cluster's scheduler refused, failed, or did not answer."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'gpus'?)`, for the end of an error; empty if no name is near, in any case."""
    import difflib

    folded = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.5)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


def bench_call(*words: object) -> str:
    """A call of bench to type in a shell: words with spaces or other signs are quoted."""
    return shlex.join(["bench", *map(str, words)])
