"""Equations between the numbers of one row: work, batch, utilisation, bandwidth.

- work: throughput x step time = samples (or tokens) of a step; tokens = samples x sequence length.
- batch: global batch = micro-batch x accumulation x gpus / (tp x pp x cp); gpus = dp x tp x pp x cp.
- utilisation: MFU = model FLOP/s / peak, and at most 1; model FLOPs a token = 6 N + attention (PaLM,
  arXiv 2204.02311, appendix B), with 12 L d s for attention over L layers of width d and s tokens.
- bandwidth: algbw = bytes / time, busbw = algbw x factor (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reports.audit.findings import (
    EXACT,
    CheckedRow,
    Disagreement,
    Quantity,
    Relation,
    applies,
    ends,
    examine,
    printed_names,
    reading,
)
from reports.audit.hardware import highest_peak
from reports.audit.intervals import Interval, exactly
from reports.audit.rows import AuditedRow

MEANS = 0.01
MEANS_WHY = "the mean of a rate and that of a time differ by their squared variation: 1 % allows one of 10 %"
PEAKS_WHY = "data sheets round their peaks: 989, 989.4 and 990 TFLOP/s are one device"
CONVENTIONS = 0.10
CONVENTIONS_WHY = "conventions differ: embeddings counted or not, causal attention whole or half"
FOURTH_DIGIT = 0.0005
FOURTH_DIGIT_WHY = "nccl-tests prints times with 4 digits: half a unit of the fourth is up to 0.05 %"
LEAST_ASPECT = 10
"""Width over layers of a transformer, at least: bounds the attention where the width is not known."""


def _product(*factors: Any) -> Any:
    return functools.reduce(operator.mul, factors)


def _counts(*factors: Any) -> Any:
    product = _product(*factors)
    if isinstance(product, float) or product.high - product.low >= 1e-6:
        return product
    return exactly(round(product.middle, 6))


RELATIONS = (
    Relation(
        check="work",
        formula="samples/s x step time = global batch",
        needs=("samples_per_s", "step_s"),
        found="global_batch",
        expected=_product,
        tolerance=MEANS,
        why=MEANS_WHY,
    ),
    Relation(
        check="work",
        formula="global batch x sequence length / step time = tokens/s",
        needs=("global_batch", "seq_len", "step_s"),
        found="tokens_per_s",
        expected=lambda batch, length, step: batch * length / step,
        tolerance=MEANS,
        why=MEANS_WHY,
    ),
    Relation(
        check="work",
        formula="model FLOPs of a step / step time = FLOP/s",
        needs=("flops_per_step", "step_s"),
        found="flops_per_s",
        expected=operator.truediv,
        tolerance=MEANS,
        why=MEANS_WHY,
    ),
    Relation(
        check="work",
        formula="samples/s x sequence length = tokens/s",
        needs=("samples_per_s", "seq_len"),
        found="tokens_per_s",
        expected=_product,
    ),
    Relation(
        check="work",
        formula="tokens/s in total / GPUs = tokens/s a GPU",
        needs=("tokens_per_s", "gpus"),
        found="tokens_per_s_device",
        expected=operator.truediv,
    ),
    Relation(
        check="work",
        formula="samples/s in total / GPUs = samples/s a GPU",
        needs=("samples_per_s", "gpus"),
        found="samples_per_s_device",
        expected=operator.truediv,
    ),
    Relation(
        check="batch",
        formula="data-parallel size x (tp x pp x cp) = GPUs",
        needs=("data_parallel", "model_devices"),
        found="gpus",
        expected=_counts,
    ),
    Relation(
        check="batch",
        formula="micro-batch x accumulation x GPUs / (tp x pp x cp) = global batch",
        needs=("micro_batch", "accumulation", "replicas"),
        found="global_batch",
        expected=_counts,
    ),
    Relation(
        check="batch",
        formula="batch a replica x GPUs / (tp x pp x cp) = global batch",
        needs=("batch_per_replica", "replicas"),
        found="global_batch",
        expected=_counts,
    ),
    Relation(
        check="batch",
        formula="batch a GPU x GPUs = global batch",
        needs=("batch_per_device", "gpus"),
        found="global_batch",
        expected=_counts,
    ),
    Relation(
        check="utilisation",
        formula="FLOP/s a GPU / peak = MFU",
        needs=("flops_per_s_device", "peak"),
        found="mfu",
        expected=operator.truediv,
        tolerance=0.01,
        why=PEAKS_WHY,
    ),
    Relation(
        check="bandwidth",
        formula="bytes / time = algorithm bandwidth",
        needs=("bytes", "time_s"),
        found="algbw",
        expected=operator.truediv,
        tolerance=FOURTH_DIGIT,
        why=FOURTH_DIGIT_WHY,
    ),
    Relation(
        check="bandwidth",
        formula="algorithm bandwidth x factor = bus bandwidth",
        needs=("algbw", "bus_factor"),
        found="busbw",
        expected=_product,
        tolerance=FOURTH_DIGIT,
        why=FOURTH_DIGIT_WHY,
    ),
    Relation(
        check="bandwidth",
        formula="bytes / time x factor = bus bandwidth",
        needs=("bytes", "time_s", "bus_factor"),
        found="busbw",
        expected=lambda size, time, factor: size / time * factor,
        tolerance=FOURTH_DIGIT,
        why=FOURTH_DIGIT_WHY,
    ),
)
_BUS_FACTORS: Mapping[str, Callable[[float], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "sendrecv": lambda n: 1.0,
}
"""Bus bandwidth over algorithm bandwidth for n ranks, by the collective's first word."""


def row_findings(row: AuditedRow, values: dict[str, Quantity]) -> Iterator[tuple[Relation, CheckedRow]]:
    """What the equations and bounds say of one row, each with the relation that says it."""
    factor = bus_factor(row.facts.get("collective", ""), values)
    if factor is not None:
        values["bus_factor"] = factor
    for relation in RELATIONS:
        # The look-ups first: most rows lack most quantities.
        if relation.found in values and relation.needs[0] in values:
            examined = examine(relation, row.line, values)
            if examined is not None:
                yield relation, examined
    for check in (_whole_accumulation, _shares_of_the_peak, _recomputation, _model_flops, _within_the_peak):
        yield from check(row, values)


def bus_factor(collective: str, values: Mapping[str, Quantity]) -> Quantity | None:
    """Bus over algorithm bandwidth of a collective over `gpus` ranks; None if it is not on the list."""
    name = collective.lower().split()[0] if collective.split() else ""
    if name not in _BUS_FACTORS or "gpus" not in values:
        return None
    ranks = values["gpus"].middle
    if ranks < 1:
        return None
    exact = exactly(_BUS_FACTORS[name](ranks))
    shown = f"factor of {name} over {ranks:g} ranks {exact.low:.6g}"
    return Quantity(shown=shown, rounded=exact, loose=exact, origins=frozenset(("gpus", "collective")))


_WHOLE = Relation(
    check="batch",
    formula="global batch / (micro-batch x replicas) = a whole number of accumulated micro-batches",
    needs=("micro_batch", "replicas"),
    found="global_batch",
    expected=_product,
    why="counts are exact",
)


def _whole_accumulation(
    row: AuditedRow, values: Mapping[str, Quantity]
) -> Iterator[tuple[Relation, CheckedRow]]:
    """Global batch / (micro-batch x replicas) is a whole number where the accumulation is not printed."""
    if "accumulation" in values or not applies(_WHOLE, values):
        return
    micro, replicas, batch = (values[name].rounded for name in ("micro_batch", "replicas", "global_batch"))
    steps = batch / (micro * replicas)
    nearest = exactly(max(1, round(min(steps.middle, 1e15))))
    if nearest.widened(1e-9).meets(steps):
        yield _WHOLE, EXACT
        return
    words = "a parallel size that the row does not name, or a batch of another row"
    yield _WHOLE, _bound(row.line, _WHOLE, values, expected=ends(nearest), found=steps, words=words)


def _shares_of_the_peak(
    row: AuditedRow, values: Mapping[str, Quantity]
) -> Iterator[tuple[Relation, CheckedRow]]:
    """MFU <= 1 and HFU <= 1."""
    for name in ("mfu", "hfu"):
        if name not in row.values:
            continue
        share = values[name].rounded
        relation = Relation(
            check="utilisation", formula=f"{name.upper()} <= 1", needs=(), found=name, expected=_product,
            why="no device does more than its peak",
        )  # fmt: skip
        if share.low <= 1:
            yield relation, EXACT
            continue
        words = "percent in a column of shares" if share.low <= 100 else ""
        yield relation, _bound(row.line, relation, values, expected=(0.0, 1.0), found=share, words=words)


_RECOMPUTATION = Relation(
    check="utilisation",
    formula="HFU >= MFU",
    needs=("mfu",),
    found="hfu",
    expected=_product,
    why="the hardware executes the model's FLOPs, and what is recomputed",
)


def _recomputation(row: AuditedRow, values: Mapping[str, Quantity]) -> Iterator[tuple[Relation, CheckedRow]]:
    """HFU >= MFU."""
    if not ("mfu" in row.values and "hfu" in row.values):
        return
    found, least = values["hfu"].rounded, values["mfu"].rounded
    if found.high >= least.low:
        yield _RECOMPUTATION, EXACT
        return
    bounds = (least.low, 1.0)
    words = "HFU and MFU exchanged"
    yield _RECOMPUTATION, _bound(row.line, _RECOMPUTATION, values, expected=bounds, found=found, words=words)


_FLOPS = Relation(
    check="utilisation",
    formula="tokens/s a GPU x (6 N + attention) = model FLOP/s a GPU",
    needs=("tokens_per_s", "gpus", "flops_per_token"),
    found="flops_per_s_device",
    expected=lambda rate, gpus, flops: rate / gpus * flops,
    tolerance=CONVENTIONS,
    why=CONVENTIONS_WHY,
)


def _model_flops(row: AuditedRow, values: dict[str, Quantity]) -> Iterator[tuple[Relation, CheckedRow]]:
    """Model FLOP/s a GPU against 6 N a token and the attention, of dense models alone."""
    if (
        not row.is_dense
        or "parameters" not in values
        or "seq_len" not in values
        or _FLOPS.found not in values
    ):
        return
    flops, shown = _flops_per_token(values)
    names = ("parameters", "seq_len", "layers", "hidden")
    values["flops_per_token"] = Quantity(
        shown=f"{values['parameters'].shown}, {values['seq_len'].shown}, {shown}",
        rounded=flops,
        loose=flops,
        origins=frozenset(name for name in names if name in values),
    )
    examined = examine(_FLOPS, row.line, values)
    if examined is not None:
        yield _FLOPS, examined


def _flops_per_token(values: Mapping[str, Quantity]) -> tuple[Interval, str]:
    """6 N + 12 L d s; without L and d, from 6 N to 6 N (1 + s / 6d), with d as small as d = 10 L allows.

    From N = 12 L d^2 and d >= 10 L: 12 L d s = N s / d, and d >= (10 N / 12)^(1/3).
    """
    parameters, length = values["parameters"].rounded, values["seq_len"].rounded
    dense = parameters.scaled(6)
    if "layers" in values and "hidden" in values:
        attention = (values["layers"].rounded * values["hidden"].rounded * length).scaled(12)
        low, high = dense.low + attention.low, dense.high + attention.high
        return Interval(low, high), f"{values['layers'].shown}, {values['hidden'].shown}"
    least_width = (LEAST_ASPECT * max(parameters.low, 1.0) / 12) ** (1 / 3)
    most = dense.high + parameters.high * length.high / least_width
    return Interval(
        dense.low, most
    ), "layers and width not given: attention from 0 to N s / (10 N / 12)^(1/3)"


_PEAK = Relation(
    check="utilisation",
    formula="tokens/s a GPU x 6 N is from 0.1 % to 100 % of the device's highest peak",
    needs=("gpus", "parameters"),
    found="tokens_per_s",
    expected=_product,
    why="no device does more than its peak, and none that trains 100 million parameters "
    "is idle for 99.9 % of the time",
)
LEAST_UTILISATION, LEAST_PARAMETERS = 1e-3, 1e8


def _within_the_peak(
    row: AuditedRow, values: Mapping[str, Quantity]
) -> Iterator[tuple[Relation, CheckedRow]]:
    """0.001 peak <= 6 N x tokens/s a GPU <= peak, of dense models from 100 million parameters on."""
    peak = highest_peak(row.facts.get("hardware", ""), row.facts.get("precision", ""))
    if peak is None or not row.is_dense or not applies(_PEAK, values):
        return
    if values["parameters"].middle < LEAST_PARAMETERS or values["gpus"].middle <= 0:
        return
    flops = values["tokens_per_s"].rounded / values["gpus"].rounded * values["parameters"].rounded.scaled(6)
    bounds = Interval(LEAST_UTILISATION * peak, peak)
    if bounds.meets(flops):
        yield _PEAK, EXACT
        return
    words = reading(flops, exactly(peak), "tokens_per_s", values["gpus"]) or "another unit, or another model"
    yield _PEAK, _bound(row.line, _PEAK, values, expected=ends(bounds), found=flops, words=words)


def _bound(
    line: int,
    relation: Relation,
    values: Mapping[str, Quantity],
    *,
    expected: tuple[float, float],
    found: Interval,
    words: str,
) -> CheckedRow:
    """A number outside its bounds; the difference is that to the nearer one."""
    nearer = expected[1] if found.low > expected[1] else expected[0]
    names = (*relation.needs, relation.found)
    disagreement = Disagreement(
        check=relation.check,
        lines=(line,),
        formula=relation.formula,
        inputs=tuple(values[name].shown for name in names),
        expected=expected,
        found=ends(found),
        difference=found.middle / nearer - 1 if nearer else None,
        tolerance=relation.tolerance,
        why=relation.why,
        reading=words,
        quantity=relation.found,
        quantities=printed_names(relation, values),
    )
    return CheckedRow(is_exact=False, finding=disagreement)
