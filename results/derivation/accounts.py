"""The budget of a run, which divides the time of a step into parts, and the columns of its ranks. Pure.

All times are in nanoseconds of one step. The ranks of a run are given in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from results.derivation.communication import blocked_by_step, bubble_by_step
from results.derivation.load import imbalance_ns, rows_by_rank
from results.derivation.matching import Floats, Matched, recorded_of
from results.errors import SchemaError
from results.record import Quads, RankRecord
from results.run import RankColumns, StepBudget
from results.statistics import Metric, differences, within_run


def step_budget(
    ranks: Sequence[RankRecord], step_ns: float, phase_ns: Mapping[str, float], matched: Matched | None
) -> StepBudget | None:
    """The step time in parts that add up to it; None where `why_no_accounts` has the reason.

    input is the data phase of the timed steps on the slowest rank of each period, which the others wait
    for. The other parts of several ranks are measured in blocks after the timed ones. `other` is the step
    time less all parts, and so contains what changed on the machine in between. One rank has only input and
    compute, the step less its input and less what it has beyond its phases.
    """
    if not phase_ns:
        return None
    if len(ranks) == 1:
        nothing = Metric(value=0.0, unit="ns", low=None, high=None, samples=1, interval=None)
        return StepBudget(
            method="one rank",
            input_ns=phase_ns["data"],
            compute_ns=step_ns - phase_ns["data"] - phase_ns["other"],
            transfer_ns=nothing,
            wait_ns=nothing,
            other_ns=phase_ns["other"],
        )
    if _bubble_is_unknown(ranks):
        return None
    data = np.array([rank.steps.data_ns for rank in ranks], dtype=np.float64)
    period = max(1, ranks[0].period)
    complete = data[:, : data.shape[1] - data.shape[1] % period]
    # The mean over periods of the largest data phase of a rank, per step.
    data_ns = float(complete.reshape(len(ranks), -1, period).mean(axis=2).max(axis=0).mean())
    return _on_off(ranks, step_ns, data_ns) or _by_the_recorder(ranks, step_ns, data_ns, matched)


def _bubble_is_unknown(ranks: Sequence[RankRecord]) -> bool:
    """Whether the ranks are stages of a pipeline without a recorded bubble, which transfer would include."""
    return _are_stages(ranks) and _bubble(ranks) is None


def _are_stages(ranks: Sequence[RankRecord]) -> bool:
    return any(rank.work is not None and rank.work.bubble_ideal is not None for rank in ranks)


def why_no_accounts(ranks: Sequence[RankRecord]) -> str:
    """Why a run has no budget."""
    if not ranks[0].steps.data_ns:
        return "bench did not take the steps, and knows no parts of them"
    if _bubble_is_unknown(ranks):
        return "what a pipeline's stages wait for each other is not recorded, and would count as transfer"
    if all(rank.quads is not None and rank.quads.on_first_ns for rank in ranks):
        return "the single steps of its blocks without exchange were not kept: an older bench measured it"
    reasons = {key: why for rank in reversed(ranks) for key, why in rank.absent.items()}
    without_blocks = reasons.get("quads", "none were measured")
    return (
        f"no blocks without exchange ({without_blocks}), and no time blocked by the recorder that could be "
        f"taken apart ({reasons.get('recorded', 'not recorded, or by sends between two ranks')})"
    )


def quads_of(ranks: Sequence[RankRecord]) -> list[Quads] | None:
    """The quads of all ranks; None unless all have them with the single steps of their off blocks.

    Raises SchemaError if the off blocks do not consist of complete periods.
    """
    quads = [rank.quads for rank in ranks if rank.quads is not None and rank.quads.off_step_ns]
    if not ranks or len(quads) < len(ranks):
        return None
    if ranks[0].period < 1 or quads[0].steps % ranks[0].period:
        raise SchemaError(
            f"the off blocks of run {ranks[0].run_id} of {ranks[0].cell_id} have {quads[0].steps} steps, not "
            f"a multiple of the period {ranks[0].period}: their records were edited, move the run away"
        )
    return quads


def copies_of(quads: Sequence[Quads]) -> float | None:
    """The time that the copies of a step without exchange take on the rank with most, as the median over the
    off blocks; None in older records.

    Off blocks count it as computation, so that exposed communication may be larger by up to this time; by
    less where the copies hide behind computation.
    """
    if not quads or not all(own.copies_ns for own in quads):
        return None
    return float(np.median(np.max([own.copies_ns for own in quads], axis=0)))


def off_periods(quads: Sequence[Quads], period: int) -> Floats:
    """The time that each rank needs for a step without waiting for others: (ranks, quads, periods).

    Each value is the mean over the steps of a complete period of an off block. Ranks meet only once a period,
    so a rank that is slow in one of its steps can catch up in another.
    """
    steps = np.array([own.off_step_ns for own in quads], dtype=np.float64)
    means: Floats = steps.reshape(len(quads), len(quads[0].on_first_ns), -1, period).mean(axis=3)
    return means


def _on_off(ranks: Sequence[RankRecord], step_ns: float, data_ns: float) -> StepBudget | None:
    """The budget from blocks with and without the exchange. For each quad, with c(r, s) the time of rank r in
    off step s:

    compute = mean over r and s of c; expected slowest = mean over s of the maximum over r of c; wait =
    expected slowest - compute: the time that the mean rank loses because each period waits for its slowest
    rank, by persistently slow ranks and by random skew together, less what the rows of experts explain;
    transfer = mean time of an on step to the
    last rank - expected slowest.

    Their values are means over the quads. Without the exchange the stages of a pipeline do not wait. The wait
    that the recorder saw has two parts: the wait above, as stages take different times, and the bubble, which
    is the rest. The bubble occurs only in on steps and is subtracted from transfer.
    """
    quads = quads_of(ranks)
    if quads is None:
        return None
    own = off_periods(quads, ranks[0].period)
    compute = own.mean(axis=(0, 2))
    slowest = own.max(axis=0).mean(axis=1)
    rows = np.array([[q.on_first_ns, q.on_second_ns] for q in quads], dtype=np.float64)
    on = rows.max(axis=0).sum(axis=0)
    wait_ns = _over_quads(slowest - compute)
    waited_ns = _bubble(ranks)
    bubble_ns = None if waited_ns is None else max(0.0, waited_ns - wait_ns.value)
    wait_ns, imbalance = _split_off_imbalance(ranks, own, wait_ns)
    return _adding_up(
        StepBudget(
            method="on-off",
            input_ns=data_ns,
            compute_ns=float(compute.mean()),
            transfer_ns=_over_quads(on / (2 * quads[0].steps) - slowest - (bubble_ns or 0.0)).or_more(
                copies_of(quads) or 0.0
            ),
            wait_ns=wait_ns,
            imbalance_ns=imbalance,
            bubble_ns=bubble_ns,
            other_ns=0.0,
        ),
        step_ns,
    )


def _split_off_imbalance(
    ranks: Sequence[RankRecord], off_ns: Floats, wait_ns: Metric
) -> tuple[Metric, float | None]:
    """Split a wait, where `off_ns` has the off steps of each rank, into the rest and what rows of experts
    explain."""
    rows = None if _are_stages(ranks) else rows_by_rank(ranks)
    if rows is None:
        return wait_ns, None
    explained = min(max(0.0, wait_ns.value), imbalance_ns(rows, off_ns.mean(axis=(1, 2))))
    return wait_ns.mapped(lambda end: end - explained), explained


def _over_quads(values: Floats) -> Metric:
    return differences(values.tolist(), "ns", of="t95-quads")


def _by_the_recorder(
    ranks: Sequence[RankRecord], step_ns: float, data_ns: float, matched: Matched | None
) -> StepBudget | None:
    """The budget from the recorder's time blocked; None unless all ranks have it. For each recorded step,
    means over ranks:

    exposed = time blocked, less the bubble; wait = the wait inside of collectives, or all that is exposed if
    that is less in the mean: only exposed wait counts; transfer = exposed - wait;
    compute = step - time blocked - the mean data phase of the timed steps.

    Their values are means over the steps, with intervals by batch means; on CUDA, where time blocked is one
    figure for all profiled steps, without.
    """
    recorded = recorded_of(ranks)
    blocked = None if recorded is None else blocked_by_step(recorded)
    if recorded is None or blocked is None or matched is None or matched.unmatched:
        return None
    bubble = bubble_by_step(recorded)
    figures = blocked.shape[1]
    exposed = _over_ranks(blocked, figures)
    if bubble is not None:
        exposed = np.maximum(exposed - _over_ranks(bubble, figures), 0.0)
    waited = _over_ranks(matched.wait_ns, figures)
    wait = waited if waited.mean() <= exposed.mean() else exposed
    step = float(np.mean([own.step_ns for own in recorded]))
    return _adding_up(
        StepBudget(
            method="recorded",
            input_ns=data_ns,
            compute_ns=step - float(blocked.mean()) - data_ns,
            transfer_ns=within_run((exposed - wait).tolist(), "ns"),
            wait_ns=within_run(wait.tolist(), "ns"),
            bubble_ns=None if bubble is None else float(bubble.mean()),
            other_ns=0.0,
        ),
        step_ns,
    )


def _over_ranks(values: Floats, figures: int) -> Floats:
    """Means over ranks of (ranks, steps): one a step, or one of all steps where `figures` is 1."""
    means: Floats = values.mean(axis=0)
    return means if len(means) == figures else means.mean(keepdims=True)


def _bubble(ranks: Sequence[RankRecord]) -> float | None:
    recorded = recorded_of(ranks)
    bubble = None if recorded is None else bubble_by_step(recorded)
    return None if bubble is None else float(bubble.mean())


def _adding_up(budget: StepBudget, step_ns: float) -> StepBudget:
    """The budget with the rest of the step as `other_ns`."""
    parts = (
        budget.input_ns,
        budget.compute_ns,
        budget.transfer_ns.value,
        budget.waits_ns,
        budget.bubble_ns or 0.0,
    )
    return msgspec.structs.replace(budget, other_ns=step_ns - sum(parts))


def rank_columns(ranks: Sequence[RankRecord], matched: Matched | None) -> RankColumns | None:
    """One value a rank; None for one rank, or without the single steps of off blocks.

    Means and standard deviations (n - 1) are over the off steps. The slowest share is the share of complete
    periods in which the others would wait for this rank; ranks that are equally slow share a period.
    """
    quads = quads_of(ranks)
    if quads is None or len(ranks) == 1:
        return None
    steps = np.array([own.off_step_ns for own in quads], dtype=np.float64)
    periods = off_periods(quads, ranks[0].period).reshape(len(ranks), -1)
    slowest = periods == periods.max(axis=0)
    recorded = recorded_of(ranks)
    blocked = None if recorded is None else blocked_by_step(recorded)
    return RankColumns(
        node=[rank.node_rank for rank in ranks],
        compute_ns=_whole(steps.mean(axis=1)),
        compute_sd_ns=_whole(steps.std(axis=1, ddof=1)),
        slowest_share=[round(float(share), 6) for share in (slowest / slowest.sum(axis=0)).mean(axis=1)],
        wait_ns=None if matched is None or matched.unmatched else _whole(matched.wait_ns.mean(axis=1)),
        blocked_ns=None if blocked is None else _whole(blocked.mean(axis=1)),
        steps=steps.shape[1],
        host=[rank.environment.host for rank in ranks],
        rows=rows_by_rank(ranks),
    )


def _whole(values: Floats) -> list[int]:
    return [round(float(value)) for value in values]
