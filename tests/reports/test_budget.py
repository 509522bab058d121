"""A cell's budget over its runs, and what of a step is lost, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import msgspec
import numpy as np
import pytest

from reports.analysis.budget import CellBudget, Lost, budget, lost, why_no_budget
from reports.analysis.figures import CellFigures, cell_figures
from results.run import StepBudget
from results.statistics import Metric

MS = 1_000_000


def metric(ms: float, low: float | None = None, high: float | None = None) -> Metric:
    ends = [None if end is None else end * MS for end in (low, high)]
    kind = None if low is None else "t95-quads"
    return Metric(value=ms * MS, unit="ns", low=ends[0], high=ends[1], samples=8, interval=kind)


def parts(
    *,
    input: float = 1.0,
    compute: float = 10.0,
    transfer: float = 2.0,
    wait: float = 0.5,
    bubble: float | None = None,
    method: str = "on-off",
) -> StepBudget:
    return StepBudget(
        method=method,
        input_ns=input * MS,
        compute_ns=compute * MS,
        transfer_ns=metric(transfer, transfer - 0.25, transfer + 0.25),
        wait_ns=metric(wait),
        bubble_ns=None if bubble is None else bubble * MS,
        other_ns=0.0,
    )


@pytest.fixture
def cell(planted) -> Callable[..., CellFigures]:
    """The figures of a cell whose runs have step times in ms and budgets."""

    def made(
        runs: list[tuple[float, StepBudget | None]], gpus: int = 4, batch: int = 8, **fields: object
    ) -> CellFigures:
        planned = planted.points("ddp", {gpus: [ms for ms, _ in runs]}, batch=batch)[0]
        study = planted.analysed()
        pool = study.pools[planned.id]
        changed = [
            msgspec.structs.replace(run, budget=own, **fields)
            for run, (_, own) in zip(pool.runs, runs, strict=True)
        ]
        found = cell_figures(replace(pool, runs=tuple(changed)))
        assert found is not None
        return found

    return made


def budget_of(figures: CellFigures) -> CellBudget:
    found = budget(figures)
    assert found is not None
    return found


def in_ms(values: dict[str, float]) -> dict[str, float]:
    return {name: value / MS for name, value in values.items()}


def test_parts_are_means_over_runs_and_the_rest_is_other(cell) -> None:
    one = budget_of(
        cell(
            [
                (14.0, parts(input=1.0, compute=10.0, transfer=2.0, wait=0.5)),
                (18.0, parts(input=2.0, compute=11.0, transfer=4.0, wait=0.7)),
            ]
        )
    )
    # 16 - 1.5 - 10.5 - 3 - 0.6 = 0.4.
    expected = {"input": 1.5, "compute": 10.5, "transfer": 3.0, "wait": 0.6, "other": 0.4}
    assert in_ms(dict(one.part_ns)) == pytest.approx(expected)
    assert sum(one.part_ns.values()) == pytest.approx(one.step_ns)
    assert one.share("transfer") == pytest.approx(3 / 16)
    assert one.share("bubble") is None
    # Below six runs their range, not the quads'.
    assert (one.transfer_ns.low, one.transfer_ns.high) == (2.0 * MS, 4.0 * MS)
    assert one.transfer_ns.interval == "range"
    assert one.warning is None


def test_from_six_runs_on_transfer_and_wait_have_an_interval_of_t(cell) -> None:
    one = budget_of(cell([(20.0, parts(transfer=float(n), wait=n / 10)) for n in range(1, 7)]))
    # Mean 3.5, sd 1.8708, t of 5 degrees 2.5706: half 2.5706 x 1.8708 / sqrt(6) = 1.9633.
    assert one.transfer_ns.low == pytest.approx((3.5 - 1.9633) * MS, rel=1e-4)
    assert one.wait_ns.high == pytest.approx((0.35 + 0.19633) * MS, rel=1e-4)
    assert one.transfer_ns.interval == "t95-runs"


def test_one_run_has_the_interval_of_its_quads(cell) -> None:
    one = budget_of(cell([(14.0, parts(transfer=2.0))]))
    assert (one.transfer_ns.low, one.transfer_ns.high) == (1.75 * MS, 2.25 * MS)
    assert one.transfer_ns.interval == "t95-quads"


@pytest.mark.parametrize(
    ("step_ms", "said"),
    [
        # Without other 13.5: 0.7 of 14.2 are 4.9 %, 0.8 of 14.3 are 5.6 %, -0.7 of 12.8 are -5.5 %.
        (14.2, None),
        (14.3, "the parts come from steps that took 5.6 % less time than the timed ones"),
        (12.9, None),
        (12.8, "the parts come from steps that took 5.5 % longer than the timed ones"),
    ],
)
def test_a_residual_above_five_percent_is_a_warning(cell, step_ms, said) -> None:
    warning = budget_of(cell([(step_ms, parts())])).warning
    assert warning is None if said is None else warning.startswith(said)


def test_a_residual_of_one_rank_lies_outside_of_its_phases(cell) -> None:
    # 1 + 8 of 10.
    alone = parts(compute=8.0, transfer=0.0, wait=0.0, method="one rank")
    assert budget_of(cell([(10.0, alone)], gpus=1)).warning == "10.0 % of the step lies outside of its phases"


def test_a_run_without_a_budget_leaves_the_cell_without_one_and_says_why(cell) -> None:
    one = cell([(14.0, parts()), (14.0, None)])
    assert budget(one) is None
    # The planted records have no quads.
    assert "quads were turned off" in (why_no_budget(one) or "")


def test_unlike_methods_are_not_mixed(cell) -> None:
    one = cell([(14.0, parts()), (14.0, parts(method="recorded"))])
    assert budget(one) is None
    assert why_no_budget(one) == "its runs have budgets by different methods: on-off, recorded"


def test_the_loss_under_weak_scaling_is_above_the_baselines_computation(cell) -> None:
    nothing = parts(input=1.0, compute=8.0, transfer=0.0, wait=0.0, method="one rank")
    baseline = budget_of(cell([(9.0, nothing)], gpus=1))
    here = budget_of(cell([(14.0, parts(input=1.0, compute=10.0, transfer=2.0, wait=0.5))], gpus=4))
    loss = lost(here, baseline)
    # A replica does the same work: 14 - 8 = 6, of which compute takes 10 - 8.
    assert loss.total_ns == pytest.approx(6 * MS)
    assert loss.share == pytest.approx(6 / 14)
    expected = {"input": 1.0, "compute": 2.0, "transfer": 2.0, "wait": 0.5, "other": 0.5}
    assert in_ms(dict(loss.part_ns)) == pytest.approx(expected)
    assert sum(loss.part_ns.values()) == pytest.approx(loss.total_ns)


def test_under_strong_scaling_the_ideal_is_a_share_of_the_baselines_computation(cell) -> None:
    # Both do 32 samples a step: 40 ms on one are 10 ms on four.
    nothing = parts(compute=40.0, transfer=0.0, wait=0.0, method="one rank")
    baseline = budget_of(cell([(41.0, nothing)], gpus=1, batch=32))
    here = budget_of(cell([(15.0, parts(compute=9.0, transfer=4.5))], gpus=4, batch=8))
    loss = lost(here, baseline)
    assert loss.ideal_ns == pytest.approx(10 * MS)
    assert loss.part_ns["compute"] == pytest.approx(-1 * MS)
    assert loss.largest == "transfer"


def test_a_baseline_of_several_ranks_is_scaled_by_the_work_of_one(cell) -> None:
    # 2 ranks with 8 each; 4 ranks with 16 each do twice as much a rank: 2 x 10.
    baseline = budget_of(cell([(14.0, parts())], gpus=2, batch=8))
    here = budget_of(cell([(30.0, parts(compute=20.0))], gpus=4, batch=16))
    assert lost(here, baseline).ideal_ns == pytest.approx(20 * MS)


def test_a_part_whose_interval_holds_zero_is_not_shown(cell) -> None:
    baseline = budget_of(cell([(11.0, parts(transfer=0.0, wait=0.0))], gpus=1))
    here = budget_of(cell([(14.0, parts(transfer=0.2, wait=0.5))], gpus=4))
    loss = lost(here, baseline)
    # Transfer is 0.2 +- 0.25; wait has no interval, and counts by its value.
    assert not loss.shown("transfer")
    assert loss.shown("wait")
    assert not loss.shown("compute")


@pytest.fixture
def loss_of(cell) -> Callable[..., Lost]:
    """Compute the loss of runs with these parts in ms against baseline runs with `ideals` of computation."""
    template = budget_of(cell([(14.0, parts())]))

    def made(ideals: Sequence[float] = (10.0,), **run_ms: Sequence[float]) -> Lost:
        given = {"compute": [10.0], "transfer": [0.0], "wait": [0.0]} | run_ms
        runs = max(map(len, given.values()))
        columns = {part: np.resize(values, runs) * MS for part, values in given.items()}
        return Lost(
            budget=replace(
                template,
                part_ns={part: float(values.mean()) for part, values in columns.items()},
                run_part_ns=tuple(
                    {part: float(v[run]) for part, v in columns.items()} for run in range(runs)
                ),
            ),
            ideal_ns=fmean(ideals) * MS,
            run_ideal_ns=tuple(ideal * MS for ideal in ideals),
        )

    return made


def test_a_thousandth_of_the_largest_part_is_no_rival_whatever_the_spread(loss_of) -> None:
    # Of two runs Student's t with one degree of freedom asks for leads that are six errors apart.
    assert loss_of(transfer=(30.0, 60.0), wait=(0.03, 0.04)).rivals == ()
    assert loss_of(transfer=(30.0, 60.0), wait=(3.0, 50.0)).rivals == ("wait",)


def test_a_part_that_leads_in_every_run_by_more_than_chance_has_no_rivals(loss_of) -> None:
    # Leads of 2, 2.5 and 3: mean 2.5, standard error 0.5 / sqrt(3) = 0.289, times t(2) = 2.920 is 0.84.
    loss = loss_of(transfer=(6.0, 6.0, 6.0), wait=(4.0, 3.5, 3.0))
    assert (loss.largest, loss.rivals) == ("transfer", ())


def test_a_part_that_trails_in_one_run_has_a_rival(loss_of) -> None:
    loss = loss_of(transfer=(6.0, 6.0, 4.0), wait=(4.0, 4.0, 4.1))
    assert (loss.largest, loss.rivals) == ("transfer", ("wait",))
    assert loss.ends_ns("wait") == pytest.approx((4.0 * MS, 4.1 * MS))


def test_a_lead_in_every_run_that_chance_may_give_has_a_rival(loss_of) -> None:
    # Leads of 0.1, 0.1 and 4: mean 1.4, standard error 2.252 / sqrt(3) = 1.3, times 2.920 is 3.8.
    assert loss_of(transfer=(4.1, 4.1, 8.0), wait=(4.0,)).rivals == ("wait",)


def test_one_run_leads_by_its_value(loss_of) -> None:
    assert loss_of(transfer=(4.1,), wait=(4.0,)).rivals == ()
    assert loss_of(transfer=(4.0,), wait=(4.0,)).rivals == ("wait",)


def test_computation_leads_against_every_run_of_the_baseline(loss_of) -> None:
    # 15 - 11 is above the transfer of 3, and 15 - 12.5 below.
    for slowest, rivals in ((11.0, ()), (12.5, ("transfer",))):
        loss = loss_of((10.9, 11.0, slowest), compute=(15.0, 15.0), transfer=(3.0,))
        assert (loss.largest, loss.rivals) == ("compute", rivals)


def test_a_wrong_cause_is_rarely_named_and_a_clear_one_often(loss_of) -> None:
    """200 studies of known truth: a part leads by 0 to 3 standard deviations of its runs, of 3 to 15 %."""
    draw = np.random.default_rng(20261122)
    wrong, clear, right = 0, 0, 0
    for _ in range(200):
        runs = int(draw.integers(3, 7))
        spread_ms, lead = 10.0 * draw.uniform(0.03, 0.15), draw.uniform(0, 3)
        # Correlated at 0.6: what both have in common, and what each has alone.
        common = draw.normal(size=runs) * 0.6**0.5
        ahead, behind = (10.0 + spread_ms * (common + draw.normal(size=runs) * 0.4**0.5) for _ in range(2))
        loss = loss_of(transfer=ahead + lead * spread_ms, wait=behind)
        named = None if loss.rivals else loss.largest
        wrong += named == "wait"
        clear += lead >= 2
        right += lead >= 2 and named == "transfer"
    assert wrong <= 2
    assert right >= 0.8 * clear
