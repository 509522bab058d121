"""Quantities that follow from others of the same row; what a table prints itself always goes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reports.audit.findings import Quantity
from reports.audit.hardware import peaks
from reports.audit.intervals import Interval, exactly
from reports.audit.rows import AuditedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """`name` is `of(*needs)`."""

    name: str
    needs: tuple[str, ...]
    of: Callable[[Interval, Interval], Interval]
    words: str


_RULES = (
    Derivation(
        name="samples_per_s",
        needs=("samples_per_s_device", "gpus"),
        of=Interval.__mul__,
        words="per GPU x GPUs",
    ),
    Derivation(
        name="tokens_per_s",
        needs=("tokens_per_s_device", "gpus"),
        of=Interval.__mul__,
        words="per GPU x GPUs",
    ),
    Derivation(
        name="global_batch",
        needs=("batch_per_device", "gpus"),
        of=Interval.__mul__,
        words="batch per GPU x GPUs",
    ),
    Derivation(
        name="global_batch",
        needs=("batch_per_replica", "replicas"),
        of=Interval.__mul__,
        words="batch per replica x replicas",
    ),
    Derivation(
        name="flops_per_s_device",
        needs=("flops_per_s", "gpus"),
        of=Interval.__truediv__,
        words="total / GPUs",
    ),
    Derivation(name="flops_per_s_device", needs=("mfu", "peak"), of=Interval.__mul__, words="MFU x peak"),
)
"""In this order: a rule may need the result of an earlier one."""
DEGREES = ("tensor", "pipeline", "context")


def derived(row: AuditedRow) -> dict[str, Quantity]:
    """The row's values and what follows from them."""
    values = dict(row.values)
    _sizes(values)
    peak = peaks(row.facts.get("hardware", ""), row.facts.get("precision", ""))
    if peak is not None:
        values["peak"] = Quantity(
            shown=f"peak {peak.low:g} to {peak.high:g} FLOP/s",
            rounded=peak,
            loose=peak,
            origins=frozenset(("peak",)),
        )
    for rule in _RULES:
        if rule.name not in values and rule.needs[0] in values and rule.needs[1] in values:
            values[rule.name] = _applied(rule, values)
    return values


def _sizes(values: dict[str, Quantity]) -> None:
    """Devices of one replica, tp x pp x cp with 1 for what is not given, and replicas, gpus over it."""
    given = [name for name in DEGREES if name in values]
    devices = float(round(math.prod(values[name].middle for name in given)))
    shown = " x ".join(values[name].shown for name in given) or "tp = pp = cp = 1"
    values["model_devices"] = _count(shown, devices, frozenset(given))
    if "gpus" in values and devices > 0:
        gpus = values["gpus"]
        values["replicas"] = _count(
            f"{gpus.shown} / ({shown})", gpus.middle / devices, frozenset((*given, "gpus"))
        )


def _count(shown: str, value: float, origins: frozenset[str]) -> Quantity:
    point = exactly(value)
    return Quantity(shown=shown, rounded=point, loose=point, origins=origins)


def _applied(rule: Derivation, values: Mapping[str, Quantity]) -> Quantity:
    one, other = (values[need] for need in rule.needs)
    return Quantity(
        shown=f"{rule.name} = {rule.words}: {one.shown}, {other.shown}",
        rounded=rule.of(one.rounded, other.rounded),
        loose=rule.of(one.loose, other.loose),
        origins=one.origins | other.origins,
    )
