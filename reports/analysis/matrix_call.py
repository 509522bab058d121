"""The `bench matrix` call that runs points of a study: its cells again, or others of the same series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.analysis.scaling import Curve
from reports.analysis.series import SeriesKey, setting_of
from reports.analysis.study import StudyFigures
from results.cell import DEFAULT_COLLECTIVE, UNCOMPRESSED, StepPolicy
from results.errors import bench_call
from results.notation import NO_LINK
from results.plan import Request, Scaling

_DEFAULTS = Request(workloads=(), gpus=(), strategies=())
_VALUES = (
    "dataset",
    "precision",
    "accumulation",
    "optimizer",
    "clip_norm",
    "memory_limit_mb",
    "memory_format",
    "seed",
    "gpus_per_node",
    "node_size",
)
"""Fields of a request that are options of the same name, with a value."""
_STEPS = {"warmup_max_steps": "warmup_steps", "block_steps": "", "target": "", "quads": ""}
"""Fields of a step policy, and their options where these have another name."""


def matrix_call(
    study: StudyFigures,
    key: SeriesKey,
    gpus: Sequence[int],
    *,
    repeats: int | None = None,
    rerun: bool = False,
    alone: str | None = None,
) -> str:
    """The call that runs a series on `gpus`: its cells have the ids that they have in the study.

    `repeats` are the runs of a cell that there are in the end (None: as planned); with `rerun` cells that
    failed for good run again. `alone` is a strategy of one device, whose cell of the same work is run too:
    `joins` says whether one call can do both.
    """
    request = _request(study, key)
    words: list[object] = [*(study.placed or ("--name", study.name))]
    sizes = gpus if alone is None else (1, *gpus)
    words += ["--workload", key.workload]
    words += ["--strategy", key.strategy if alone is None else f"{alone},{key.strategy}"]
    words += ["--gpus", ",".join(map(str, sizes)), *_scaling(key.kind, key.constant_batch)]
    words += ["--repeats", request.repeats if repeats is None else repeats]
    words += [*_travel(key), *_settings(request), *(("--rerun", "failed") if rerun else ())]
    return bench_call("matrix", *words)


def joins(curve: Curve) -> bool:
    """Whether one call can run sizes of the curve and its single device without a further cell.

    A call is a product of its axes: the curve's strategy must be one that the plan refused on one device, and
    no other axis may have a value that the single device would need another of.
    """
    key, single = curve.key, curve.single
    plain = (key.compression, key.collective, key.link) == (UNCOMPRESSED, DEFAULT_COLLECTIVE, NO_LINK)
    return (
        single is not None
        and plain
        and single.figures.cell.strategy != key.strategy
        and single.figures.cell.compression == UNCOMPRESSED
        and any(gap.gpus == 1 and gap.skipped for gap in curve.gaps)
    )


def _request(study: StudyFigures, key: SeriesKey) -> Request:
    """That of the newest plan with cells of the same settings."""
    plans = [plan for plan in study.plans if any(setting_of(cell) == key.setting for cell in plan.cells)]
    return plans[-1].request


def _scaling(kind: Scaling, batch: int) -> tuple[object, ...]:
    return ("--batch-size", batch) if kind == "weak" else ("--scaling", kind, "--global-batch-size", batch)


def _travel(key: SeriesKey) -> Iterator[object]:
    defaults = {"compression": UNCOMPRESSED, "collective": DEFAULT_COLLECTIVE, "link": NO_LINK}
    for name, default in defaults.items():
        if getattr(key, name) != default:
            yield from (f"--{name}", getattr(key, name))


def _settings(request: Request) -> Iterator[object]:
    """What the whole matrix has in common, as far as it differs from the defaults of the options."""
    for name in _VALUES:
        value = getattr(request, name)
        if value != getattr(_DEFAULTS, name):
            yield from (f"--{name.replace('_', '-')}", value)
    yield from ("--device", request.device)
    if request.backend != ("nccl" if request.device == "cuda" else "gloo"):
        yield from ("--backend", request.backend)
    if request.activation_checkpointing:
        kind = "selective" if request.activation_checkpointing == "selective" else "activation"
        yield f"--{kind}-checkpointing"
    if request.compile:
        yield "--compile"
    yield from _steps(request.steps)


def _steps(policy: StepPolicy) -> Iterator[object]:
    default = StepPolicy()
    for name, option in _STEPS.items():
        value = getattr(policy, name)
        if value != getattr(default, name):
            yield from (f"--{(option or name).replace('_', '-')}", value)
    if policy.budget_s != default.budget_s:
        yield from ("--budget", f"{policy.budget_s:g}s")
