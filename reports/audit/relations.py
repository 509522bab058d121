"""Equations between the numbers of one row: work, batch, utilisation, bandwidth.

- work: throughput x step time = samples (or tokens) of a step; tokens = samples x sequence length.
- batch: global batch = micro-batch x accumulation x gpus / (tp x pp x cp); gpus = dp x tp x pp x cp.
- utilisation: MFU = model FLOP/s / peak, and at most 1; model FLOPs a token = 6 N + attention (PaLM,
  arXiv 2204.02311, appendix B), with 12 L d s for attention over L layers of width d and s tokens.
- bandwidth: algbw = bytes / time, busbw = algbw x factor (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from reports.audit.findings import Disagreement, Quantity, Relation, compare, difference, ends
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


def _product(*factors: Interval) -> Interval:
    product = exactly(1)
    for factor in factors:
        product = product * factor
    return product


def _counts(*factors: Interval) -> Interval:
    product = _product(*factors)
    return exactly(round(product.middle, 6)) if product.high - product.low < 1e-6 else product


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
        expected=Interval.__truediv__,
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
        expected=Interval.__truediv__,
    ),
    Relation(
        check="work",
        formula="samples/s in total / GPUs = samples/s a GPU",
        needs=("samples_per_s", "gpus"),
        found="samples_per_s_device",
        expected=Interval.__truediv__,
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
        expected=Interval.__truediv__,
        tolerance=0.01,
        why=PEAKS_WHY,
    ),
    Relation(
        check="bandwidth",
        formula="bytes / time = algorithm bandwidth",
        needs=("bytes", "time_s"),
        found="algbw",
        expected=Interval.__truediv__,
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


def row_findings(row: AuditedRow, values: Mapping[str, Quantity]) -> Iterator[Disagreement]:
    """What the equations say of one row."""
    factor = bus_factor(row.facts.get("collective", ""), values)
    known = values if factor is None else {**values, "bus_factor": factor}
    for relation in RELATIONS:
        finding = compare(relation, (row.line,), known)
        if finding is not None:
            yield finding
    for check in (_whole_accumulation, _above_peak, _model_flops):
        finding = check(row.line, known)
        if finding is not None:
            yield finding


def bus_factor(collective: str, values: Mapping[str, Quantity]) -> Quantity | None:
    """Bus over algorithm bandwidth of a collective over `gpus` ranks; None if it is not on the list."""
    name = collective.lower().split()[0] if collective.split() else ""
    if name not in _BUS_FACTORS or "gpus" not in values:
        return None
    ranks = values["gpus"].rounded.middle
    if ranks < 1:
        return None
    exact = exactly(_BUS_FACTORS[name](ranks))
    return Quantity(
        shown=f"factor of {name} over {ranks:g} ranks {exact.low:.6g}", rounded=exact, loose=exact
    )


def _whole_accumulation(line: int, values: Mapping[str, Quantity]) -> Disagreement | None:
    """Global batch / (micro-batch x replicas) is a whole number where the accumulation is not printed."""
    if "accumulation" in values or any(
        name not in values for name in ("global_batch", "micro_batch", "replicas")
    ):
        return None
    batch, micro, replicas = (values[name].rounded for name in ("global_batch", "micro_batch", "replicas"))
    steps = batch / (micro * replicas)
    nearest = exactly(max(1, round(min(steps.middle, 1e15))))
    if nearest.widened(1e-9).meets(steps):
        return None
    return Disagreement(
        check="batch",
        lines=(line,),
        formula="global batch / (micro-batch x replicas) = a whole number of accumulated micro-batches",
        inputs=tuple(values[name].shown for name in ("global_batch", "micro_batch", "replicas")),
        expected=ends(nearest),
        found=ends(steps),
        difference=difference(steps, nearest),
        tolerance=0.0,
        why="counts are exact",
        reading="a parallel size that the row does not name, or a batch of another row",
    )


def _above_peak(line: int, values: Mapping[str, Quantity]) -> Disagreement | None:
    """MFU <= 1."""
    if "mfu" not in values or values["mfu"].rounded.low <= 1:
        return None
    found = values["mfu"].rounded
    return Disagreement(
        check="utilisation",
        lines=(line,),
        formula="MFU <= 1",
        inputs=(values["mfu"].shown,),
        expected=(0.0, 1.0),
        found=ends(found),
        difference=found.middle - 1,
        tolerance=0.0,
        why="no device does more than its peak",
        reading="percent in a column of shares" if found.low <= 100 else "",
    )


_FLOPS = Relation(
    check="utilisation",
    formula="tokens/s a GPU x (6 N + attention) = model FLOP/s a GPU",
    needs=("tokens_per_s", "gpus", "flops_per_token"),
    found="flops_per_s_device",
    expected=lambda rate, gpus, flops: rate / gpus * flops,
    tolerance=CONVENTIONS,
    why=CONVENTIONS_WHY,
)


def _model_flops(line: int, values: Mapping[str, Quantity]) -> Disagreement | None:
    """Model FLOP/s a GPU against 6 N a token, with the attention as far as it is known."""
    if "parameters" not in values or "seq_len" not in values:
        return None
    flops, words = _flops_per_token(values)
    shown = f"{values['parameters'].shown}, {values['seq_len'].shown}, {words}"
    token = Quantity(shown=shown, rounded=flops, loose=flops)
    return compare(_FLOPS, (line,), {**values, "flops_per_token": token})


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
