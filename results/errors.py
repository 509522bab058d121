"""The errors that a user can see. Each is one line with what was given, what is allowed, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from types import MappingProxyType


class BenchError(Exception):
    """An error with a message meant for the user; anything else is a defect of this program."""

    exit_code = 1
    """The exit code of a command that ends by it."""


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
    """An extension of another package cannot be imported, or has the wrong kind."""


class SchedulerError(BenchError):
    """A cluster's scheduler refused, failed, or did not answer."""


SYNONYMS = MappingProxyType(
    {
        "float32": "fp32",
        "float16": "fp16",
        "half": "fp16",
        "bfloat16": "bf16",
        "fp8": "float8",
        "--nodes": "--gpus-per-node",
        "--nnodes": "--gpus-per-node",
        "--nproc-per-node": "--gpus-per-node",
        "--world-size": "--gpus",
        "--lr": "--optimizer sgd:lr=0.1",
        "--learning-rate": "--optimizer sgd:lr=0.1",
        "--weight-decay": "--optimizer sgd:weight_decay=0.1",
        "--model": "--workload",
        "--arch": "--workload",
        "--bs": "--batch-size",
        "--amp": "--precision bf16",
        "--bf16": "--precision bf16",
        "--fp16": "--precision fp16",
        "--dtype": "--precision",
        "--gradient-accumulation-steps": "--accumulation",
        "--gradient-checkpointing": "--activation-checkpointing",
        "--max-grad-norm": "--clip-norm",
        "--output-dir": "--out",
    }
)
"""Names in other tools, each with the name here, which may be followed by an example."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'gpus'?)`, for the end of an error; empty if no name is near, in any case.

    The dashes before an option do not count as a likeness.
    """
    import difflib

    folded = {each.lower().lstrip("-"): each for each in known}
    synonym = SYNONYMS.get(name.lower())
    if synonym is not None and synonym.split(" ")[0] in folded.values():
        return f" (did you mean {synonym!r}?)"
    close = difflib.get_close_matches(name.lower().lstrip("-"), list(folded), n=1, cutoff=0.6)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


def bench_call(*words: object) -> str:
    """A call of bench to type in a shell: words with spaces or other signs are quoted."""
    return shlex.join(["bench", *map(str, words)])
