"""How it was measured: the definitions that several sections share, and those that the sections bring along.

The first sentence of a definition says what the number is: the head of a column shows it on hover.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from markupsafe import Markup

from reports.page.section import Definition, Section
from results.cell import REFERENCE_STRATEGY

_SHARED = (
    Definition(
        "method-step-time",
        "Step time",
        Markup(
            "<code>Wall time of a block of steps to the last rank / steps of the block</code>. Steps are "
            "timed in blocks between barriers, and a block lasts until the last rank has finished; a run's "
            "step time is the mean over its blocks, a cell's the mean over its runs."
        ),
    ),
    Definition(
        "method-throughput",
        "Throughput",
        Markup(
            "<code>Work of a step on all ranks / step time</code>: total work over total time. Rates are "
            "never averaged. The ends of its interval are those of the step time, inverted."
        ),
    ),
    Definition(
        "method-interval",
        "Interval",
        "Below six runs their range (the smallest and the largest, no probability), from six on a 95 % "
        "interval of Student's t over the logarithms of the runs (differences and shares: over the values). "
        "The run, not the step, is the independent sample; one run has no interval. Within one run, steps "
        "are correlated; the run's own precision, by which measuring stops, is found by the method of batch "
        "means over ten batches of blocks, and says nothing about another run.",
    ),
    Definition(
        "method-scaling",
        "Scaling and batch",
        Markup(
            "<code>Batch per replica = micro-batch x accumulation</code> and <code>global batch = batch per "
            "replica x replicas</code>, in samples of one update. Weak scaling keeps the batch per replica, "
            "strong scaling keeps the global batch."
        ),
    ),
    Definition(
        "method-sizes",
        "Sizes",
        "How many workers the cell had, one device each. On a CPU they are ranks, and every page says so.",
    ),
    Definition(
        "method-efficiency",
        "Efficiency",
        Markup(
            "<code>E(n) = X(n) n0 / (X(n0) n)</code>, with X the throughput in samples a second and n0 the "
            "size of the baseline. Two baselines, both named: the strategy's own smallest size, and the "
            "fastest single device of the same work, which exchanges nothing and is the same for every "
            "compressor, collective and link. The interval is of the ratio of runs: below six runs the "
            "smallest and the largest ratio that two runs give, from six on Welch's t on logarithms. A "
            "point whose interval lies above 1 (one run: above 1.05) is marked super-linear, not hidden: "
            "often a smaller share of the work fits a cache. Cells of unlike machines, software or code are "
            "not divided; the reason is given instead."
        ),
    ),
    Definition(
        "method-scaling-speed-up",
        "Speed-up",
        Markup(
            "<code>S(n) = X(n) / X(n0) = E(n) n / n0</code>: how many times the baseline's throughput in "
            "samples a second. The ideal is n / n0. It is claimed where an efficiency is, against the same "
            "baseline, and its interval is that of the efficiency times n / n0."
        ),
    ),
    Definition(
        "method-phases",
        "Phases",
        "Data, forward, backward and optimizer by each rank's own clock (the monotonic clock on a CPU, "
        "events on a GPU), the mean over ranks and steps. Backward contains the exchange of gradients that "
        "it hides or waits for.",
    ),
    Definition(
        "method-other",
        "Other",
        Markup(
            "<code>Step time - (data + forward + backward + optimizer)</code>: what the step has beyond its "
            "phases, with the wait for the slowest rank. It can be slightly negative where ranks differ; a "
            "bar then ends at zero."
        ),
    ),
    Definition(
        "method-slow",
        "Slow steps and quantiles",
        "Over steps, of the step's maximum over ranks. A slow step lies above the upper quartile plus 1.5 "
        "interquartile ranges of its run; slow steps are counted, never removed. Quantiles are the mean "
        "over runs of each run's own.",
    ),
    Definition(
        "method-allocations",
        "Allocations",
        "The step time of one and the same cell in an allocation over the median of all allocations: how "
        "far nodes and days differ. Every job of a scheduler times that cell on one of its devices, before "
        "its own cells; nothing is corrected by it.",
    ),
    Definition(
        "method-exposed",
        "Exposed communication",
        Markup(
            "<code>((on1 + on2) - (off1 + off2)) / (2 x steps of a block)</code>: what the exchange adds to "
            "a step, each block to the last rank. Blocks with (on) and without (off) the exchange run in "
            "the order on, off, off, on within one run: gradients, and what sharded, pipelined and "
            "tensor-parallel strategies send of parameters and activations. It contains what the exchange "
            "slows the computation by, and of a pipeline the bubble. Its share is the mean over runs of the "
            "exposed time over the mean "
            "step time. It can come out slightly negative where there is nothing to see."
        ),
    ),
    Definition(
        "method-payload",
        "Payload and operations",
        "Bytes of the buffers that one rank hands to the collectives and sends of the exchange in a step, "
        "and how many these are: counted, not timed. What travels on the wire depends on the algorithm and "
        "is not this number.",
    ),
    Definition(
        "method-buckets",
        "Buckets, and early ones",
        "Vectors of gradients (or of parameters, where these are averaged) that one rank begins to exchange "
        "in a step; early are those that begin while gradients of the same backward pass are still to come, "
        "so that their exchange may hide behind it. Counted in steps after the timed ones, equal in every "
        "repetition of the same code. What torch exchanges by itself is counted by its sums in the backward "
        "pass.",
    ),
    Definition(
        "method-speed-up",
        "Speed-up of an exchange",
        Markup(
            "<code>Step time of the dense exchange / step time</code> of cells that differ in the exchange "
            "alone: above 1 is faster. It is compared with the dense exchange (no compressor, the default "
            "collective) of the same strategy; that exchange itself, or where there is none, with the one "
            f"of {REFERENCE_STRATEGY}. Its interval is made as that of an efficiency, from the ratios of "
            'runs. "faster" and "slower" say that it lies on one side of 1, the value by 2 % or more, else '
            'it is "no gain". '
            "Three runs of two equal exchanges lie apart by chance one time in ten, five one time in 126; "
            "fewer than three are not judged. Runs of unlike conditions, and emulated beside measured ones, "
            "are not compared."
        ),
    ),
    Definition(
        "method-gradient-rate",
        "Gradients over exposed time",
        "The bytes of the model's gradients in single precision, 4 a parameter, over the exposed "
        "communication of a step: the same bytes for every exchange, however few it sends and by whichever "
        "way, so that rows can be compared. It is not the bandwidth of the network, since some of the "
        "exchange may hide behind computation; encoding and decoding are computation, and in the step time "
        "alone. Empty where the interval of the exposed time reaches 0.",
    ),
    Definition(
        "method-flops",
        "FLOPs and MFU",
        Markup(
            "FLOPs are of forward and backward, counted once per model without recomputation (one "
            "multiply-add is two operations); <code>MFU = FLOP/s / sum of the devices' dense peaks at the "
            "cell's precision</code>. It is empty where no peak is known."
        ),
    ),
    Definition(
        "method-parameters",
        "Parameters",
        "How many numbers the model learns, on one replica.",
    ),
    Definition(
        "method-memory",
        "Peak memory",
        "The most that any rank held in any counted run: on the host the resident set of its process, on the "
        "device what the allocator gave out.",
    ),
    Definition(
        "method-set-up",
        "Set-up",
        "Building the model, the data and the strategy of a run, without its proof and warm-up.",
    ),
    Definition(
        "method-warmup",
        "Warm-up",
        "Steps before the step time was steady. They are kept in the records and are in no figure.",
    ),
    Definition(
        "method-proof",
        "Proof",
        Markup(
            "How it was checked that the cell trained what it says. <code>serial-simulation</code>: every "
            "replica's micro-batches were recomputed on one device from the same parameters, and the "
            "gradients compared within a bound. <code>replica-agreement</code>, the weaker one where that "
            "does not fit: after training, the parameters of all replicas are equal bit for bit and the "
            "loss is finite; the first and the last loss are given. <code>earlier-run</code>: an earlier run "
            "of the same cell and code was checked. A run whose check fails has no figure."
        ),
    ),
    Definition(
        "method-evidence",
        "Evidence and runs",
        Markup(
            "How many runs the figure is over, and what kind of number it is. <code>measured</code>: as "
            "many cores or devices as ranks. <code>emulated</code>: real code on a stand-in (more ranks "
            "than cores or devices, virtual nodes inside of one host, a link of a given rate by traffic "
            "shaping); no efficiency is claimed. Only runs of one environment (device, versions, placement, "
            "code) and one kind of evidence are put together."
        ),
    ),
    Definition(
        "method-disturbed",
        "Disturbed",
        "Other processes used more than 5 % of the cores that the ranks of a run had on a host, while it "
        "measured. Its figure is kept and marked.",
    ),
)
_CPU = Definition(
    "method-cpu",
    "On a CPU",
    "A rank has one core and one thread, and the backend's threads share it, so overlap is limited. Sizes "
    "count ranks.",
)


def definitions(sections: Iterable[Section], *, cpu: bool) -> tuple[Definition, ...]:
    """Every definition of the page; one that a section brings replaces the shared one of its anchor."""
    own = {one.anchor: one for section in sections for one in section.definitions}
    shared = {one.anchor: one for one in _SHARED}
    return (*(shared | own).values(), *([_CPU] if cpu else []))


def hints(defined: Iterable[Definition]) -> Mapping[str, str]:
    """What the head of a column says on hover, by the anchor that it links to: the first sentence."""
    return {one.anchor: first_sentence(one.text) for one in defined}


def first_sentence(text: str) -> str:
    """Up to the first full stop before a capital letter, without markup."""
    plain = text.striptags() if isinstance(text, Markup) else text
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", plain, maxsplit=1)[0]
