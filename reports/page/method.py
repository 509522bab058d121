"""How it was measured: the definitions that several sections share, and the definitions of single sections.

The first sentence of a definition says what the number is, because column heads show it on hover.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from markupsafe import Markup

from reports.page.section import Definition, Section

_SHARED = (
    Definition(
        "method-step-time",
        "Step time",
        Markup(
            "<code>Wall time of a block of steps to the last rank / steps of the block</code>; a run's is "
            "the mean over its blocks, a cell's the mean over its runs. Figures do not include warm-up steps."
        ),
    ),
    Definition(
        "method-throughput",
        "Throughput",
        Markup(
            "<code>Work of a step on all ranks / step time</code>: total work over total time. Its "
            "interval is the inverted interval of the step time."
        ),
    ),
    Definition(
        "method-interval",
        "Interval",
        "Below six runs their range (no probability), from six on a 95 % interval of Student's t over the "
        "logarithms of the runs (differences and shares: over the values). The run, not the step, is the "
        "independent sample, so a single run has no interval.",
    ),
    Definition(
        "method-scaling",
        "Scaling and batch",
        Markup(
            "<code>Batch per replica = micro-batch x accumulation</code>, <code>global batch = batch per "
            "replica x replicas</code>, in samples of one update. Weak scaling keeps the first, strong the "
            "second."
        ),
    ),
    Definition(
        "method-sizes",
        "Sizes",
        "The number of workers of the cell, with one device each. On a CPU they are ranks, and the page "
        "says so.",
    ),
    Definition(
        "method-efficiency",
        "Efficiency",
        Markup(
            "<code>E(n) = X(n) n0 / (X(n0) n)</code>, with X the throughput in samples a second and n0 the "
            "size of the baseline: the fastest single device of the same work, else the series' own smallest "
            "size. The interval is of the ratio of runs: below six the smallest and the largest that two "
            "runs give, from six on Welch's t on logarithms. Speed-up is E(n) n / n0. An interval above 1 "
            "(one run: above 1.05) is marked super-linear. Cells of different machines, software or code "
            "are not divided."
        ),
    ),
    Definition(
        "method-slow",
        "p99",
        "99 of 100 steps are faster, by the step's maximum over ranks; the mean over runs. All steps count.",
    ),
    Definition(
        "method-exposed",
        "Added by the exchange",
        Markup(
            "<code>((on1 + on2) - (off1 + off2)) / (2 x steps of a block)</code>: what the exchange adds to "
            "a step, each block to the last rank. Blocks with (on) and without (off) the exchange run in "
            "the order on, off, off, on within one run. It contains the slowdown of the computation by the "
            "exchange, some random wait and the bubble of a pipeline, so it is not exposed transfer plus "
            "exposed wait, which are of the mean rank. Its share is the mean over runs over the mean step "
            "time. A step without exchange copies a rank's own values to the places that the exchange would "
            "fill. Where these copies take more than 5 % of the figure, its interval is a range: the low end "
            "counts them as computation, and the high end as part of the exchange. So does the interval of "
            "exposed transfer."
        ),
    ),
    Definition(
        "method-payload",
        "Payload and operations",
        "Bytes of the buffers that one rank hands to the collectives and sends of the exchange in a step, "
        "and the number of these operations: counted, not timed. The bytes on the wire depend on the "
        "algorithm.",
    ),
    Definition(
        "method-buckets",
        "Buckets, early ones, and the backward pass that is left",
        "Vectors of gradients that a rank begins to exchange in a step, in the cell's newest run: of the "
        "rank with the most. Early ones begin before the last gradient of the same backward pass is ready: "
        "of the rank with the fewest. What is left of the backward pass when a bucket begins can hide its "
        "exchange: the share of the nodes of the graph that have not begun, a mean over the buckets, of the "
        "rank with the least. It is counted, so it is equal in each run; nodes differ in the time they take.",
    ),
    Definition(
        "method-experts",
        "Busiest expert",
        "Rows of the expert that has most in its layer over the mean of the layer's experts, in the layer "
        "where this is largest: counted on all ranks in the measured steps; the mean over runs. Dropped rows "
        "are the share of all rows that no expert computed, because it was at its capacity.",
    ),
    Definition(
        "method-imbalance",
        "Cost of imbalance",
        Markup(
            "<code>Step time / step time with an even load</code>, of two cells that differ only in how "
            "tokens choose experts; the interval is of the ratio of runs, as of an efficiency. A step is "
            "longer or shorter where Welch's t and the smallest effect show it, for all such pairs together. "
            "An even load is an upper bound of the speed of a trained router."
        ),
    ),
    Definition(
        "method-cost",
        "Cost",
        Markup(
            "<code>Devices used x price of one device and hour x time</code>, for the time of 1,000 steps, "
            "a million samples or a billion tokens, which follows from the step time and has its interval. "
            "On a CPU the device is a rank. It does not include devices of a node that the cell does not "
            "use, start-up, evaluation, checkpoints, storage, traffic and failed runs. Only measured cells "
            "have a cost."
        ),
    ),
    Definition(
        "method-epoch",
        "Epoch",
        Markup(
            "<code>Samples of an epoch / global batch x step time</code>, and its cost. The samples of "
            "an epoch are the size of the data set, if it is known, or --epoch-samples."
        ),
    ),
    Definition(
        "method-flops",
        "FLOPs and MFU",
        Markup(
            "FLOPs of forward and backward, once per model without recomputation; <code>MFU = FLOP/s / sum "
            "of the devices' dense peaks at the cell's precision</code>."
        ),
    ),
    Definition(
        "method-parameters", "Parameters", "The number of values that the model learns, on one replica."
    ),
    Definition(
        "method-set-up",
        "Set-up, first step, start-up",
        "Set-up: building model, data and strategy, without proof and warm-up. First step: with allocation, "
        "tuning and compilation. Start-up: from the start of a launch to its first cell. No step time "
        "contains any of them.",
    ),
    Definition(
        "method-proof",
        "Proof",
        Markup(
            "The check that the cell really trained. <code>serial-simulation</code>: every "
            "replica's micro-batches were recomputed on one device from the same parameters, and the "
            "gradients compared within a bound. <code>sampled-gradients</code>, where that takes too long: "
            "random projections of every gradient are the mean of the replicas'; updates are not "
            "recomputed. <code>replica-agreement</code>, weaker: the parameters of "
            "all replicas are equal bit for bit at the end and the loss is finite. <code>earlier-run</code>: "
            "an earlier run of the same cell and code was checked. A run whose check fails has no figure; "
            "under <code>--proof report</code> it is <code>not proven</code>: it is drawn, and decides "
            "nothing."
        ),
    ),
    Definition(
        "method-evidence",
        "Evidence and runs",
        Markup(
            "The number of runs of the figure, and its kind. <code>measured</code>: as many cores or "
            "devices as ranks. <code>emulated</code>: real code on a stand-in (more ranks than cores or "
            "devices, virtual nodes, a link by traffic shaping); no efficiency is claimed. Only runs of one "
            "environment and one kind of evidence are pooled."
        ),
    ),
)
_CPU = Definition(
    "method-cpu",
    "On a CPU",
    "A rank has one core and one thread, and the backend's threads share it, so overlap is limited. Sizes "
    "count ranks.",
)


def definitions(sections: Iterable[Section], *, cpu: bool) -> tuple[Definition, ...]:
    """Every definition of the page; a section's definition replaces the shared one with the same anchor."""
    own = {one.anchor: one for section in sections for one in section.definitions}
    shared = {one.anchor: one for one in _SHARED}
    return (*(shared | own).values(), *([_CPU] if cpu else []))


def hints(defined: Iterable[Definition]) -> Mapping[str, str]:
    """The first sentence of each definition by its anchor, which heads of columns show on hover."""
    found = {}
    for one in defined:
        plain = one.text.striptags() if isinstance(one.text, Markup) else one.text
        # Up to the first full stop before a capital letter.
        found[one.anchor] = re.split(r"(?<=[.!?])\s+(?=[A-Z])", plain, maxsplit=1)[0]
    return found
