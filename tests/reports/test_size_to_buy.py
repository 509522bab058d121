"""The size to buy by each goal, how surely, and the next run. Weak scaling: X(n) is 8 n over a step time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest

from harness.reporting.assumptions import read_goal
from harness.reporting.reading import place_words
from reports.analysis.assumptions import Assumptions, Goal
from reports.analysis.next_run import next_run
from reports.analysis.size_to_buy import CPU, NONE_PROVEN, ONE_LEFT, ONE_SIZE, SizeToBuy, sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.verdict import verdict
from results.catalogue.prices import Price
from results.errors import UsageError
from results.outcome import Evidence, Outcome

PRICE = Price(usd_per_gpu_hour=3.6, source="given")
STEPS = {1: 10.0, 2: 10.5, 4: 12.0, 8: 24.0}
"""Yields of doublings 2 T(n) / T(m) - 1: 0.90, 0.75, 0; efficiencies 95.2 %, 83.3 % and 41.7 %."""


@pytest.fixture
def gpus(tmp_path, new_study):
    """A study on GPUs: `single` on 1 and `ddp` on the others, with runs that differ by 0.2 %."""
    number = itertools.count()

    def made(steps=STEPS, *, runs: int = 6, spread: float = 0.002, device: str = "cuda", **timing):
        planted = new_study(tmp_path / f"study-{next(number)}", device=device)
        cells = [*planted.series("weak", "single", [1], batch=8)]
        if larger := [n for n in steps if n > 1]:
            cells += planted.series("weak", "ddp", larger, batch=8)
        planted.plan(repeats=runs)
        for cell in cells:
            ms = steps[cell.gpus]
            planted.runs(cell, [ms * (1 + spread * (at % 3 - 1)) for at in range(runs)], **timing)
        return planted

    return made


def analysed(planted, goal: str = "knee", **told) -> StudyFigures:
    return planted.analysed(name="study", assumptions=Assumptions(goal=read_goal(goal), **told))


def bought(planted, goal: str = "knee", **told) -> SizeToBuy:
    [found] = sizes_to_buy(analysed(planted, goal, **told))
    return found


def test_the_knee_is_what_is_bought_by_default_and_what_it_rests_on_is_said(gpus) -> None:
    found = bought(gpus())
    assert (found.choice.strategy, found.choice.gpus, found.choice.or_more) == ("ddp", 4, False)
    assert found.choice.efficiency.value == pytest.approx(10 / 12, rel=1e-3)
    assert (found.confidence, found.doubts) == ("high", ())
    assert (
        found.why
        == "knee between 4 and 8: going from 4 to 8 changes throughput by +0 % (0 to 0), and +50 % or more "
        "pays"
    )
    assert (found.rests_on.runs, found.rests_on.fewest_runs, len(found.rests_on.deciding)) == (24, 6, 3)


@pytest.mark.parametrize(
    ("goal", "size", "why"),
    [
        # X(8) is X(4): no difference is shown, and 4 is the smaller of the two.
        ("throughput", 4, "the highest throughput of 4 points, "),
        (
            "cost",
            1,
            "20 min 50 s of all devices (no price is known) a million samples, the lowest of 4 points",
        ),
        ("efficiency:80%", 4, "its efficiency is 83.3 % ("),
        ("efficiency:0.9", 2, "its efficiency is 95.2 % ("),
        # An epoch of 1,000,000 samples: 1,250 s on 1, 656 s on 2, 375 s on 4 and 8; on 4 it is cheaper.
        ("time:11m", 2, "an epoch of 1,000,000 samples takes 10 min 56 s, the cheapest of 3 points in time"),
        ("time:400s", 4, "an epoch of 1,000,000 samples takes 6 min 15 s, the cheapest of 2 points in time"),
    ],
)
def test_each_goal_has_its_own_size(gpus, goal, size, why) -> None:
    found = bought(gpus(), goal, epoch_samples=1_000_000)
    assert found.choice.gpus == size
    assert found.why.startswith(why)


def test_costs_are_in_dollars_where_there_is_a_price(gpus) -> None:
    found = bought(gpus(), "time:400s", epoch_samples=1_000_000, price=PRICE)
    # 375 s of 4 GPUs at 3.60 an hour.
    assert found.choice.usd_per_epoch.value == pytest.approx(1.5, rel=1e-3)
    assert " for 1.500 USD, the cheapest of 2 points" in found.why


def test_a_goal_that_no_point_reaches_has_no_size(gpus) -> None:
    planted = gpus()
    late = bought(planted, "time:60s", epoch_samples=1_000_000)
    assert late.text.startswith(
        "none: no measured point finishes an epoch within 60.0 s; the fastest, ddp on "
    )
    assert bought(planted, "time:1h").text.startswith("none: the size of its epoch is not known: give")


def test_cpu_ranks_stand_ins_one_size_and_what_is_not_proven_get_none(gpus) -> None:
    assert bought(gpus(device="cpu")).absent == CPU
    assert bought(gpus(proof=None)).absent == NONE_PROVEN
    assert "emulated" in str(bought(gpus(evidence=Evidence.EMULATED)).absent)
    assert bought(gpus({1: 10.0})).absent == ONE_SIZE


def test_where_growing_pays_to_the_end_it_is_that_size_or_more(gpus) -> None:
    found = bought(gpus({1: 10.0, 2: 10.1, 4: 10.2}))
    assert found.choice.text == "4 GPUs or more with ddp"


def test_what_the_runs_leave_open_few_runs_and_disturbed_ones_lower_the_confidence(gpus) -> None:
    # The yield of 2 to 4 is 2 (10.5 / 14) - 1 = 0.5.
    left_open = bought(gpus({1: 10.0, 2: 10.5, 4: 14.0}, spread=0.03))
    assert left_open.confidence == "low"
    assert (left_open.choice.gpus, left_open.choice.shown_to, left_open.choice.or_more) == (4, 2, True)
    share = left_open.choice.instead[2]
    assert 0.4 < share < 0.6
    assert left_open.doubts == (f"resamples of the runs name 2 GPUs in {100 * share:.0f} %",)
    assert left_open.choice.text == f"4 GPUs or more with ddp (2 GPUs in {100 * share:.0f} % of resamples)"
    few = bought(gpus(runs=3, foreign_cpu_cores=1.0))
    assert few.confidence == "medium"
    assert few.doubts == ("3 runs a size (fewer than 6)", "all 9 runs disturbed")
    assert bought(gpus(runs=1)).confidence == "low"


def test_runs_that_are_left_out_do_not_count_towards_the_confidence(gpus) -> None:
    planted = gpus(runs=2)
    for cell in planted.study.plans()[-1].cells:
        planted.runs(cell, [1.4 * STEPS[cell.gpus]] * 4, foreign_cpu_cores=1.0)
    study = analysed(planted)
    [found] = sizes_to_buy(study)
    assert (found.choice.gpus, found.confidence) == (4, "medium")
    assert found.doubts == ("2 runs a size (fewer than 6)",)
    # Six undisturbed runs in addition to four disturbed ones.
    assert "--repeats 10" in next_run(study).command


@pytest.mark.parametrize("goal", ["knee", "throughput", "efficiency:80%"])
def test_the_figures_beside_the_size_are_of_the_runs_that_the_size_rests_on(gpus, goal) -> None:
    """Disturbed runs of the size, slower by 40 %, move neither its efficiency nor the cost of an epoch."""
    planted = gpus()
    quiet = bought(planted, goal, epoch_samples=1_000_000, price=PRICE)
    [cell] = [one for one in planted.study.plans()[-1].cells if one.gpus == quiet.choice.gpus]
    planted.runs(cell, [1.4 * STEPS[cell.gpus]] * 2, foreign_cpu_cores=1.0)
    found = bought(planted, goal, epoch_samples=1_000_000, price=PRICE)
    assert found.choice == quiet.choice
    rests_on = found.rests_on
    assert (rests_on.runs, rests_on.disturbed, rests_on.disturbed_out) == (quiet.rests_on.runs, 0, 2)


def test_an_open_size_with_disturbed_runs_gets_as_many_others(gpus) -> None:
    steps = {1: 10.0, 2: 10.5, 4: 14.0}
    planted = gpus(steps, spread=0.03)
    for cell in planted.study.plans()[-1].cells:
        planted.runs(cell, [1.4 * steps[cell.gpus]] * 6, foreign_cpu_cores=1.0)
    # Six undisturbed runs are to be twelve, in addition to six disturbed ones.
    found = next_run(analysed(planted))
    assert (found.gpus, "--repeats 18 " in found.command) == ((2, 4), True)


def test_sizes_that_cannot_be_compared_are_not_grown_beyond(gpus, new_environment) -> None:
    planted = gpus({1: 10.0, 2: 10.1, 4: 10.2})
    [cell] = planted.series("weak", "ddp", [8], batch=8)
    planted.runs(cell, [10.3] * 6, environment=new_environment(device_name="another"))
    assert next_run(analysed(planted)) is None


def test_what_is_open_beyond_the_knee_leaves_the_choice_as_sure_as_it_was(gpus) -> None:
    # From 2 to 4 nothing is gained; that of 4 to 8, 2 (20.2 / 27) - 1 = 0.496, has 0.5 in its range.
    found = bought(gpus({1: 10.0, 2: 10.1, 4: 20.2, 8: 27.0}, spread=0.03))
    assert (found.choice.text, found.confidence) == ("2 GPUs with ddp", "high")
    assert len(found.rests_on.deciding) == 3


def test_what_trains_in_another_way_is_not_chosen_from(gpus, new_study) -> None:
    planted = gpus()
    more = new_study(planted.study.root, device="cuda", runs_before=100)
    cells = more.series("weak", "ddp", [2, 4, 8], batch=8, compression="topk:0.01")
    for cell in cells:
        more.runs(cell, [5.0, 5.01, 5.02])
    found = bought(more, "throughput")
    assert found.choice.strategy == "ddp"
    assert "ddp + topk:0.01 on 8 (it compresses its gradients)" in found.left_out


@pytest.mark.parametrize("goal", ["knee", "throughput", "cost", "efficiency:50%"])
def test_where_all_but_one_size_train_in_another_way_none_is_chosen(gpus, new_study, goal) -> None:
    planted = gpus({1: 10.0})
    more = new_study(planted.study.root, device="cuda", runs_before=100)
    cells = more.series("weak", "ddp", [2, 4], batch=8, compression="topk:0.01")
    for cell in cells:
        more.runs(cell, [5.0, 5.01, 5.02])
    assert bought(more, goal).absent == ONE_LEFT
    assert next_run(analysed(more, goal)) is None


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("knee", Goal()),
        ("time:24h", Goal(kind="time", limit=86400.0)),
        ("efficiency:80%", Goal(kind="efficiency", limit=0.8)),
        ("efficiency:0.8", Goal(kind="efficiency", limit=0.8)),
    ],
)
def test_goals_are_read(text, goal) -> None:
    assert read_goal(text) == goal


@pytest.mark.parametrize("text", ["fast", "time", "time:24", "efficiency:80", "efficiency:0", "knee:1", ""])
def test_other_goals_are_refused_with_what_may_be_given(text) -> None:
    with pytest.raises(UsageError, match="--goal"):
        read_goal(text)


def test_the_next_run_is_the_one_that_the_choice_waits_for(gpus) -> None:
    few = next_run(analysed(gpus(runs=3)))
    assert (few.kind, few.gpus) == ("repeats", (2, 4, 8))
    assert few.command.startswith(
        "bench matrix --name study --workload gpt-nano --strategy ddp --gpus 2,4,8 --batch-size 8 "
        "--repeats 6 --device cuda"
    )
    assert few.what == "6 runs each of ddp on 2, 4 and 8"
    assert few.why == "the answer rests on 3 runs a size"
    left_open = next_run(analysed(gpus({1: 10.0, 2: 10.5, 4: 14.0}, spread=0.03)))
    assert (left_open.kind, left_open.gpus, "--repeats 12" in left_open.command) == ("repeats", (2, 4), True)
    larger = next_run(analysed(gpus({1: 10.0, 2: 10.1, 4: 10.2})))
    assert (larger.kind, larger.gpus, larger.cells) == ("size", (8,), ())
    # From 2 to 4 growing does not pay by far: no size is open.
    assert next_run(analysed(gpus({1: 10.0, 2: 10.1, 4: 20.0}))) is None
    one = next_run(analysed(gpus({1: 10.0})))
    # The strategy of one device has no second size.
    assert (one.kind, one.strategy, one.gpus) == ("size", "ddp", (2,))
    assert "--strategy ddp --gpus 2 " in one.command


def test_the_next_run_says_what_it_takes(gpus) -> None:
    study = analysed(gpus(runs=3), price=PRICE)
    found = next_run(study)
    # Three more runs on each of 2, 4 and 8; each has 0.5 s of set-up, and steps.
    steps = study.runs[0].steps + study.runs[0].warmup_steps
    hours = sum(3 * n * (0.5 + steps * STEPS[n] / 1000) for n in (2, 4, 8)) / 3600
    assert found.gpu_hours == pytest.approx(hours, rel=1e-3)
    assert found.usd == pytest.approx(3.6 * hours, rel=1e-3)
    assert f"GPU-hours, {found.usd:.2f} USD)" in found.order
    # A larger size: all its runs, as long as those of the largest that was measured.
    larger = next_run(analysed(gpus({1: 10.0, 2: 10.1, 4: 10.2})))
    assert larger.gpu_hours == pytest.approx(6 * 8 * (0.5 + steps * 10.2 / 1000) / 3600, rel=1e-3)
    assert larger.usd is None


def test_the_single_device_that_decides_too_is_in_the_same_call(gpus) -> None:
    planted = gpus({1: 10.0, 2: 10.5, 4: 14.0}, runs=3)
    apart = next_run(analysed(planted, "efficiency:90%"))
    assert (apart.gpus, apart.what) == ((2,), "6 runs of ddp on 2")
    # A plan that refused ddp on one device: the product of both has no third cell.
    planted.series("weak", "ddp", [2, 4], batch=8)
    planted.skip("ddp", 1, "ddp needs at least 2 ranks; on 1 use single", batch=8)
    both = next_run(analysed(planted, "efficiency:90%"))
    assert (both.gpus, both.what) == ((1, 2), "6 runs each of single on 1 and ddp on 2")
    assert "--strategy single,ddp --gpus 1,2 " in both.command
    assert [cell_id.split("-g0")[0] for cell_id in both.cells] == ["gpt-nano-single", "gpt-nano-ddp"]


def test_what_was_not_run_or_failed_comes_before_what_is_open(gpus, new_study, new_timing) -> None:
    planted = new_study(gpus(runs=3).study.root, device="cuda", runs_before=100)
    cells = planted.series("weak", "ddp", [16, 32, 64], batch=8)
    planted.run(cells[0], new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="it fell over"))
    found = next_run(analysed(planted))
    assert (found.kind, found.gpus, found.why) == ("first", (32,), "it was planned and not run")
    # To run what ran out of memory again gives no figure.
    for cell in cells[1:]:
        planted.run(cell, new_timing(step_ms=1, outcome=Outcome.OUT_OF_MEMORY, reason="allocating 2 GiB"))
    again = next_run(analysed(planted))
    assert (again.kind, again.gpus, again.why) == ("failed", (16,), "it failed (crashed)")
    assert again.command.endswith("--rerun failed")
    planted.runs(cells[0], [24.1, 24.2, 24.3])
    rest = next_run(analysed(planted))
    assert rest.kind == "repeats"


@pytest.fixture
def crashed(new_study, new_timing):
    """Adds cells that crashed to a study."""

    def made(planted, strategy: str, sizes: list[int]):
        more = new_study(planted.study.root, device="cuda", runs_before=200)
        cells = more.series("weak", strategy, sizes, batch=8)
        more.plan(repeats=6)
        for cell in cells:
            more.run(cell, new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="it fell over"), sync=False)
        return more

    return made


@pytest.mark.parametrize(
    ("steps", "failed", "named", "between"),
    [
        # From 2 to 16 the throughput grows 1.86-fold: less than 1.5 ** 3, so one doubling does not pay.
        ({1: 10.0, 2: 10.5, 16: 45.0}, [4, 8], 2, "2 to 8 GPUs; ddp on 4 and 8 has no figure"),
        # Eight times 10.5 / 24 is 3.5, more than 1.5 ** 3: all doublings may pay, at a mean yield of 0.36.
        ({1: 10.0, 2: 10.5, 16: 24.0}, [4, 8], 2, "2 to 16 GPUs; ddp on 4 and 8 has no figure"),
        ({1: 10.0, 2: 10.5, 4: 12.0}, [8, 16], 4, "4 to 16 GPUs; ddp on 8 and 16 has no figure"),
        # Nobody planned 4 and 8.
        ({1: 10.0, 2: 10.5, 16: 45.0}, [], 2, "2 to 8 GPUs; ddp on 4 and 8 has no figure"),
        # With an efficiency of 90 % from 2 to 8, no doubling on the way is below 75 %.
        ({1: 10.0, 2: 10.0, 8: 11.1, 16: 30.0}, [4], 8, None),
        # Failed sizes beyond the first growth that does not pay are no doubt.
        ({1: 10.0, 2: 10.5, 4: 30.0}, [8], 2, None),
    ],
)
def test_a_hole_at_which_the_size_may_lie_is_named_and_the_next_run_closes_it(
    gpus, crashed, steps, failed, named, between
) -> None:
    planted = gpus(steps)
    if failed:
        planted = crashed(planted, "ddp", failed)
    study = analysed(planted)
    [found] = sizes_to_buy(study)
    then = next_run(study)
    assert (found.choice.gpus, found.choice.between) == (named, between)
    assert found.confidence == ("low" if between else "high")
    if between:
        assert between in found.text
        assert then.gpus == ((8,) if 16 in failed else (4, 8))
        assert ("--rerun failed" in then.command) == bool(failed)


def test_a_strategy_without_figures_where_it_may_win_is_a_doubt(gpus, crashed) -> None:
    planted = gpus()
    assert bought(planted).confidence == "high"
    study = analysed(crashed(planted, "fsdp", [2, 4, 8]))
    [found] = sizes_to_buy(study)
    # On 2 even an ideal growth from 1 is slower than ddp on 4.
    assert (found.confidence, found.choice.between) == ("low", "4 to 8 GPUs; fsdp on 4 and 8 has no figure")
    assert (next_run(study).strategy, next_run(study).gpus) == ("fsdp", (4,))


@pytest.mark.parametrize("order", [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_of_curves_that_stop_at_one_device_the_best_next_step_decides(tmp_path, new_study, order) -> None:
    """The yield of ddp is 2 (10 / 13.5) - 1 = 0.48, so that other sizes have odds; fsdp yields 0."""
    planted = new_study(tmp_path / "study", device="cuda")
    cells = planted.series("weak", "single", [1], batch=8)
    cells += [planted.series("weak", strategy, [2], batch=8)[0] for strategy in order]
    for cell in cells:
        ms = {"single": 10.0, "ddp": 13.5, "fsdp": 20.0}[cell.strategy]
        planted.runs(cell, [ms * (1 + 0.02 * (at % 3 - 1)) for at in range(6)])
    found = bought(planted)
    assert (found.choice.gpus, found.confidence) == (1, "low" if found.choice.odds[1] < 0.8 else "medium")
    assert 0.05 < found.choice.instead[2] < 0.5


def test_without_a_figure_the_next_run_is_what_did_not_run_or_failed(planted, new_timing) -> None:
    cells = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.run(cells[0], new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="it fell over"))
    found = next_run(analysed(planted))
    assert (found.kind, found.gpus) == ("first", (4,))
    planted.run(cells[1], new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="it fell over"))
    again = next_run(analysed(planted))
    assert (again.kind, again.gpus) == ("failed", (2,))
    assert again.command.endswith("--rerun failed")


def test_what_a_rank_refuses_is_not_run_again(planted, new_timing) -> None:
    cells = planted.series("weak", "fsdp", [2, 4], batch=8)
    for cell in cells:
        planted.run(cell, new_timing(step_ms=1, outcome=Outcome.SKIPPED, reason="w has no dimension"))
    assert next_run(analysed(planted)) is None


def test_the_verdict_says_both_in_the_same_words(gpus) -> None:
    study = analysed(gpus())
    told = verdict(study)
    [size] = sizes_to_buy(study)
    assert told.workloads[0].records[0].short == "4 GPUs with ddp (high confidence)"
    assert told.workloads[0].to_buy == (size,)
    assert told.next_run == next_run(study)


def test_the_command_finds_the_study_where_it_lies(gpus) -> None:
    study = replace(analysed(gpus(runs=3)), placed=("--out", "my runs/a"))
    found = next_run(study)
    assert found.command.startswith("bench matrix --out 'my runs/a' --workload")


@pytest.mark.parametrize("in_file", [False, True], ids=["flags", "a study file"])
def test_the_command_says_where_the_study_runs(gpus, tmp_path, in_file) -> None:
    study = gpus(runs=3).study
    file = tmp_path / "study.yaml"
    file.write_text("workload: mlp\ngpus: 2\nlauncher: local\nsite: a.yaml\n")
    words = (
        ("matrix", str(file), "--partition", "p1")
        if in_file
        else ("matrix", "--launcher", "local", "--site=a.yaml", "--gpus", "1..8", "--partition", "p1")
    )
    study.add_plan(msgspec.structs.replace(study.plans()[-1], command=words))
    where = ("--launcher", "local", "--site", "a.yaml", "--partition", "p1")
    assert place_words(study) == ("--out", str(study.root), *where)
