"""The metrics that the gate compares, each with its better direction and its margin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from harness.features.gate.records.baseline import Exact
from results.cell import Cell
from results.errors import UsageError, nearest
from results.run import RunResult

Better = Literal["lower", "higher", "neither"]

LARGEST_SHARE = 1.0
"""The largest margin that is accepted, from an option or from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedMetric:
    """A figure with noise. Its runs are compared with an interval."""

    name: str
    title: str
    unit: str
    read: Callable[[RunResult], float | None]
    """Read the figure of one run; None if the run lacks it."""
    better: Better = "lower"
    margin: float | None = None
    """The smallest change that matters, as a share; None: shown, and judged only with a given margin."""
    of_launch: bool = False
    """Whether all runs of a launch share one figure, which is one sample."""
    of_step: bool = False
    """Whether a change is a share of BASE's step time, because the figure itself may be near 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMetric:
    """A counter without noise: any difference is a change."""

    name: str
    title: str
    read: Callable[[RunResult, Cell], Exact | None]
    better: Better = "lower"
    worse: str = "the counter differs"
    """The meaning of a change for the worse, as a sentence without a full stop."""
    same: tuple[str, ...] = ()
    """Facts of the machine that must be equal for the counter to be compared, even with `--across`."""


M = TypeVar("M", TimedMetric, ExactMetric)


def _exposed(run: RunResult) -> float | None:
    return None if run.exposed_ns is None else run.exposed_ns.value


def _wait(run: RunResult) -> float | None:
    return None if run.budget is None or run.ranks_expected == 1 else run.budget.wait_ns.value


def _step(run: RunResult) -> float | None:
    return None if run.step_ns is None else run.step_ns.value


def _peak_memory(run: RunResult) -> float | None:
    on_device = run.device_allocated_peak_bytes
    return on_device if on_device is not None else run.rss_over_idle_bytes


def _by_name(*metrics: M) -> Mapping[str, M]:
    return MappingProxyType({metric.name: metric for metric in metrics})


TIMED = _by_name(
    TimedMetric(name="step_time", title="step time", unit="ns", read=_step, margin=0.05),
    TimedMetric(
        name="time",
        title="time",
        unit="ns",
        # Only a benchmark has this metric; a run of a cell has a step time instead.
        read=lambda run: None,
        margin=0.05,
    ),
    TimedMetric(
        name="throughput",
        title="throughput",
        unit="samples/s",
        read=lambda run: run.samples_per_s,
        better="higher",
    ),
    TimedMetric(name="exposed", title="added by the exchange", unit="ns", read=_exposed, of_step=True),
    TimedMetric(name="wait", title="wait", unit="ns", read=_wait, of_step=True),
    TimedMetric(name="peak_memory", title="peak memory", unit="bytes", read=_peak_memory, margin=0.05),
    TimedMetric(name="startup", title="start-up", unit="ns", read=lambda run: run.startup_ns, of_launch=True),
    TimedMetric(name="loss", title="loss after 20 steps", unit="", read=lambda run: run.loss_fixed),
    TimedMetric(name="final_loss", title="final loss", unit="", read=lambda run: None),
    TimedMetric(name="setup", title="set-up of the cell", unit="ns", read=lambda run: run.setup_ns),
)

EXACT = _by_name(
    ExactMetric(
        name="payload_bytes", title="bytes exchanged a step", read=lambda run, _: run.exchange_payload_bytes
    ),
    ExactMetric(
        name="operations",
        title="operations of the exchange a step",
        read=lambda run, _: run.exchange_operations,
    ),
    ExactMetric(
        name="buckets",
        title="buckets exchanged a step",
        read=lambda run, _: run.exchange_buckets,
        better="neither",
    ),
    ExactMetric(
        name="early_buckets",
        title="buckets that start before the backward pass ends",
        read=lambda run, _: run.exchange_buckets_early,
        better="higher",
        worse="buckets that started before the last gradient now wait for it, so less of their "
        "exchange hides behind the backward pass",
    ),
    ExactMetric(
        name="backward_left",
        title="share of the backward pass that is left when a bucket starts",
        read=lambda run, _: run.exchange_backward_left,
        better="higher",
        worse="buckets start later in the backward pass, so less of it is left to hide their exchange",
        # Another torch may make other nodes for the same model.
        same=("torch",),
    ),
    ExactMetric(
        name="first_hash",
        title="parameters after the first steps (hash)",
        read=lambda run, _: run.first_hash,
        better="neither",
        same=("cpu_model", "torch", "threads"),
    ),
    ExactMetric(name="flops", title="FLOPs a step", read=lambda run, _: run.flops_per_step, better="neither"),
    ExactMetric(name="parameters", title="parameters", read=lambda run, _: run.parameters, better="neither"),
    ExactMetric(
        name="device_peak_bytes",
        title="peak of allocated device memory",
        read=lambda run, cell: run.device_allocated_peak_bytes if cell.device == "cuda" else None,
    ),
)


def read_margins(texts: tuple[str, ...]) -> dict[str, float]:
    """Read margins such as `step_time=5%` as shares. Raises a UsageError that shows the form."""
    margins = {}
    for text in texts:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator:
            raise UsageError(f"--fail-above {text}: write METRIC=PERCENT, such as step_time=5%")
        require_timed(name, f"--fail-above {text}: there is")
        margins[name] = read_share(value, f"--fail-above {text}")
    return margins


def read_share(value: str, given: str) -> float:
    """A share from a text such as `5%`. Raises UsageError that names the option.

    The sign is required, because 0.05 could be a share or a twentieth of a percent.
    """
    number, sign, rest = value.partition("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = 0.0
    if not sign or rest or not 0 < share <= LARGEST_SHARE:
        raise UsageError(f"{given}: a percentage above 0 and at most {LARGEST_SHARE:.0%}, such as 5%")
    return share


def require_timed(name: str, lead: str) -> None:
    """Raises UsageError, which begins with `lead`, if no metric with a margin has this name."""
    if name not in TIMED:
        known = ", ".join(TIMED)
        raise UsageError(f"{lead} no metric {name!r}{nearest(name, TIMED)}; metrics with a margin: {known}")


def require_margins(margins: Mapping[str, float], where: str) -> None:
    """Raises UsageError for margins of a file without effect: of an unknown metric, or too large."""
    for name, share in margins.items():
        require_timed(name, f"{where}: fail_above has")
        if not 0 < share <= LARGEST_SHARE:
            raise UsageError(
                f"{where}: fail_above has {name} {share:g}: a share above 0 and at most {LARGEST_SHARE:g}; "
                "0.05 is 5 %"
            )
