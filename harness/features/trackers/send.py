"""Cells as runs of wandb and mlflow, which this module imports. Their own settings name the server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from reports.analysis.study import StudyFigures
from reports.page.columns import CELLS, cell_rows, declared
from reports.text import count
from results.errors import MachineError, bench_call

_SHOWN = ("loss_first", "loss_last", "max_difference", "max_bound", "replicas_agree")
"""Columns of the page that the exported table of cells lacks."""


class Sent(NamedTuple):
    """A run says this of a cell, by names of columns. It is `good` if the cell has figures."""

    id: str
    name: str
    settings: dict[str, Any]
    numbers: dict[str, float]
    words: dict[str, str]
    good: bool


def sent(study: StudyFigures, root: Path, *, redact: bool) -> Iterator[Sent]:
    """The cells that have run. Other calls give a run the same id while the folder `root` keeps its name."""
    known = (root.resolve().name, study.plans[0].created_at if study.plans else "")
    page = root.resolve() / "report.html"
    told = {"page": str(page)} if page.exists() else {"absent.page": bench_call("report", root.name)}
    for row in filter(lambda row: row.pool.every, cell_rows(study)):
        cell = row.cell
        settings = {name: msgspec.to_builtins(getattr(cell, name)) for name in cell.__struct_fields__}
        settings |= {"batch_per_replica": cell.batch_per_replica, "global_batch": cell.global_batch}
        values = {column.name: column.value(row) for column in CELLS} | declared(row, *_SHOWN)
        given = {name: values[name] for name in values.keys() - settings if values[name] not in (None, "")}
        words = {name: str(value) for name, value in given.items() if isinstance(value, bool | str)}
        numbers = {name: given[name] for name in given.keys() - words}
        absent = row.pool.every[-1].absent
        words |= zip(map("absent.{}".format, absent), absent.values(), strict=True)
        identity = sha256("\n".join((*known, cell.id)).encode()).hexdigest()[:16]
        yield Sent(identity, cell.id, settings, numbers, words if redact else words | told, bool(row.figures))


def to_wandb(study: StudyFigures, root: Path, *, redact: bool) -> str:
    """Write the runs of a study as a group, and say where. Raises MachineError if wandb refuses."""
    wandb, project = _tracker("wandb", "wandb>=0.24"), os.environ.get("WANDB_PROJECT", "bench")
    # The machine that exports is not the one that was measured.
    off = ("disable_git", "disable_code", "x_disable_meta", "x_disable_stats", "x_disable_machine_info")
    plain = {"silent": True, "console": "off", "host": "", "x_save_requirements": False}
    settings = wandb.Settings(**plain, **dict.fromkeys(off, True))
    runs = list(sent(study, root, redact=redact))
    try:
        for one in runs:
            named = {"id": one.id, "name": one.name, "group": study.name, "project": project}
            run = wandb.init(**named, config=one.settings, settings=settings)
            run.summary.update(one.numbers | one.words)
            run.finish(exit_code=0 if one.good else 1)
    except wandb.errors.Error as error:
        raise MachineError(f"wandb refused: {error} Type `wandb login`, or set WANDB_MODE=offline") from error
    return f"{study.name}: {count(len(runs), 'run')} in the project {project} of wandb"


def to_mlflow(study: StudyFigures, root: Path, *, redact: bool) -> str:
    """Write the runs of a study as an experiment, and say where. Raises MachineError if MLflow refuses."""
    mlflow, runs = _tracker("mlflow", "mlflow-skinny>=3"), list(sent(study, root, redact=redact))
    own, now_ms = {*_SHOWN, *(column.name for column in CELLS)}, time.time_ns() // 1_000_000
    try:
        client, make = mlflow.MlflowClient(), mlflow.entities
        home = mlflow.set_experiment(study.name).experiment_id
        for one in runs:
            old = client.search_runs([home], f"tags.`bench.id` = '{one.id}'")
            run = old[0] if old else client.create_run(home, run_name=one.name, tags={"bench.id": one.id})
            # What the cell no longer says becomes NaN or empty. MLflow 3 takes 5,000 characters.
            numbers = dict.fromkeys(run.data.metrics, nan) | one.numbers
            words = {key: "" for key in run.data.tags if key in own or key.startswith("absent.")} | one.words
            client.log_batch(
                run.info.run_id,
                metrics=[make.Metric(name, value, now_ms, 0) for name, value in numbers.items()],
                params=[make.Param(name, str(value)[:5000]) for name, value in one.settings.items()],
                tags=[make.RunTag(name, word[:5000]) for name, word in words.items()],
            )
            client.set_terminated(run.info.run_id, {True: "FINISHED", False: "FAILED"}[one.good])
    except mlflow.exceptions.MlflowException as error:
        raise MachineError(f"MLflow refused ({mlflow.get_tracking_uri()}): {error}") from error
    return f"{study.name}: {count(len(runs), 'run')} in an experiment of {mlflow.get_tracking_uri()}"


def _tracker(name: str, needed: str) -> Any:
    """Import a tracker. Raises MachineError if it is not installed."""
    # Python would import a folder that a tracker has written here, such as `wandb/`, as a package.
    if (spec := find_spec(name)) is None or spec.origin is None:
        raise MachineError(f"{name} is not installed: pip install '{needed}'")
    return import_module(name)
