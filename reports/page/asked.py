"""What was asked of a study, and where and when it ran, in two lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten

from reports.analysis.series import told_settings
from reports.analysis.study import StudyFigures
from reports.text import count, listed
from results.cell import DEFAULT_COLLECTIVE, SYNTHETIC, UNCOMPRESSED
from results.link import NO_LINK

_ROOM = 60
"""Characters of a command that the first screen has room for."""


def asked_text(study: StudyFigures) -> str:
    """`gpt2-small on 1 to 256 GPUs, weak (8 samples a replica) and strong ...: ddp, fsdp. 85 cells.`"""
    requests = [plan.request for plan in study.plans]
    sizes = sorted({gpus for request in requests for gpus in request.gpus})
    strategies = _all(request.strategies for request in requests)
    more = [
        *_told("compression", _all(request.compressions for request in requests), UNCOMPRESSED),
        *_told("collective", _all(request.collectives for request in requests), DEFAULT_COLLECTIVE),
        *_told("link", _all(request.links for request in requests), NO_LINK),
    ]
    repeats = max((request.repeats for request in requests), default=0)
    span = f"{sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f"{sizes[0]:,}" if sizes else "no"
    workloads = listed(_all(request.workloads for request in requests), most=6)
    return (
        f"{workloads} on {span} {study.devices_word}, {' and '.join(_scalings(study)) or 'as planned'}, by "
        f"{listed(strategies, most=12)}{''.join(f'; {one}' for one in more)}. "
        f"{count(len(study.pools), 'cell')}, {count(repeats, 'run')} each."
    )


def ran(study: StudyFigures) -> str:
    """Device, backend, arithmetic, data, settings that are not the default, seed and days of the runs."""
    cells = [pool.cell for pool in study.pools.values()]
    environments = [run.environment for run in study.runs if run.environment is not None]
    names = _all([one.device_name] for one in environments)
    days = sorted({run.started_at[:10] for run in study.runs if run.started_at})
    when = f"ran {days[0]} to {days[-1]}" if len(days) > 1 else f"ran {days[0]}" if days else "nothing ran"
    parts = [
        listed(names) if names else "",
        *(
            ", ".join(_all([str(getattr(cell, field))] for cell in cells))
            for field in ("backend", "precision")
        ),
        ", ".join(
            f"{name} data" if name == SYNTHETIC else name for name in _all([cell.dataset] for cell in cells)
        ),
        *told_settings(study.plans),
        f"seed {', '.join(_all([str(cell.seed)] for cell in cells))}" if cells else "",
        when,
    ]
    return ", ".join(part for part in parts if part)


def called(study: StudyFigures) -> str:
    """`; asked by bench matrix --gpus 1..2`: the first call, as far as a line has room; the environment has
    all."""
    if not study.commands:
        return ""
    first, *others = study.commands
    more = f" and {count(len(others), 'more call')}" if others else ""
    return f"; asked by {shorten(first, _ROOM, placeholder=' ...', break_on_hyphens=False)}{more}"


def _scalings(study: StudyFigures) -> Iterator[str]:
    """`weak (8 samples a replica)`."""
    for kind, of in (("weak", "a replica"), ("strong", "in all")):
        batches = sorted({curve.key.batch for curve in study.curves if curve.key.kind == kind})
        if batches:
            yield f"{kind} ({listed([f'{batch:,}' for batch in batches])} samples {of})"


def _told(what: str, values: Sequence[str], default: str) -> Iterator[str]:
    if list(values) not in ([], [default]):
        yield f"{what} {listed(values, most=8, last=', ')}"


def _all(groups: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(value for group in groups for value in group))
