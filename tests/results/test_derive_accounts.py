"""Figures of a run other than its step time: telemetry, energy, the course of the loss, work done once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from builders import a_work, an_environment, steps_of
from launching import an_attempt

from results.derivation.counters import device_energy, telemetry_means
from results.derivation.run_result import derive, mean_losses
from results.outcome import Outcome
from results.record import Telemetry


def _sampled(energy_j: float | None = None, window_ns: int | None = None, **series: object) -> Telemetry:
    samples = max((len(values) for values in series.values()), default=0)
    return Telemetry(at_ms=list(range(samples)), series=dict(series), energy_j=energy_j, window_ns=window_ns)


def test_telemetry_is_the_mean_over_ranks_of_their_samples(two) -> None:
    # power_w: rank 0 (100 + 300) / 2 = 200, rank 1 what is known: 60; mean 130, largest 300.
    # Rank 0 alone has the network; of `fan` nothing is known.
    samples = (
        _sampled(power_w=[100.0, 300.0], net_bytes=[5.0, 7.0], fan=[None, None]),
        _sampled(power_w=[None, 60.0, None]),
    )
    run = two(telemetry=samples)
    assert run.telemetry == {"power_w": 130, "power_w_max": 300, "net_bytes": 6, "net_bytes_max": 7}
    assert two(telemetry=(samples[0], None)).telemetry["power_w"] == 200
    assert two(telemetry=None).telemetry == {}


def test_a_bit_mask_keeps_all_bits_that_were_ever_set(two) -> None:
    samples = _sampled(throttle_reasons=[1.0, 4.0]), _sampled(throttle_reasons=[64.0, None])
    assert two(telemetry=samples).telemetry == {"throttle_reasons": 69}


def test_a_device_that_was_throttled_is_warned_of(two) -> None:
    # One sample of four of rank 0, none of rank 1: an eighth.
    samples = _sampled(throttled=[0.0, 1.0, 0.0, 0.0]), _sampled(throttled=[0.0])
    assert "a device was throttled in 12% of the samples" in two(telemetry=samples).warnings
    assert two(telemetry=(samples[1], samples[1])).warnings == two(telemetry=None).warnings


def test_the_energy_of_a_step_is_the_power_of_all_devices_times_its_time(two) -> None:
    # 600 J in 2 s and 100 J in 0.5 s: 500 W; a step takes 50 ms (fixture): 25 J.
    samples = _sampled(600.0, 2 * 10**9), _sampled(100.0, 5 * 10**8)
    run = two(telemetry=samples)
    assert run.energy_j == pytest.approx(25)
    assert "energy_j" not in run.absent


def test_a_device_that_ranks_share_has_its_energy_and_power_once(cell_of, record_of) -> None:
    """Ranks 0 and 1 read the counter of one device; rank 2 has another one, rank 3 one of another host."""
    power, places = (300.0, 300.0, 60.0, 60.0), (("a", "x"), ("a", "x"), ("a", "y"), ("b", "x"))
    ranks = [
        record_of(
            cell_of(gpus=4),
            rank,
            environment=msgspec.structs.replace(an_environment(), host=host, device_uuid=uuid),
            telemetry=_sampled(2 * watts, 2 * 10**9, power_w=[watts], cpu_s=[watts]),
        )
        for rank, (watts, (host, uuid)) in enumerate(zip(power, places, strict=True))
    ]
    assert device_energy(ranks, 1e9) == pytest.approx(300 + 60 + 60)
    means = telemetry_means(ranks)
    assert means["power_w"] == pytest.approx((300 + 60 + 60) / 3)
    # What a rank reads of its own process counts once a rank.
    assert means["cpu_s"] == pytest.approx(180)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"telemetry": None}, "no telemetry was recorded"),
        ({"telemetry": None, "absent": {"telemetry": "psutil is missing"}}, "psutil is missing"),
        (
            {"telemetry": (_sampled(600.0, 10**9), _sampled())},
            "the device of rank 1 gave no readings of an energy counter",
        ),
        (
            {"telemetry": (_sampled(600.0, 0), _sampled(600.0, 10**9))},
            "the device of rank 0 gave no readings of an energy counter",
        ),
        (
            {
                "telemetry": (_sampled(600.0, 10**9), _sampled()),
                "absent": ({}, {"energy_j": "a slice of a GPU"}),
            },
            "a slice of a GPU",
        ),
    ],
)
def test_without_the_counter_of_one_rank_there_is_no_energy(two, fields, why) -> None:
    run = two(**fields)
    assert (run.energy_j, run.absent["energy_j"]) == (None, why)


@pytest.fixture
def losses_of(cell_of, record_of) -> Callable[..., tuple[tuple[float, ...], int]]:
    """The course of the loss of two ranks; the first `warmup` losses are from the warm-up."""

    def course(
        first: list[float | None], second: list[float | None], warmup: int = 0
    ) -> tuple[tuple[float, ...], int]:
        return mean_losses(
            [
                record_of(cell_of(), rank, warmup_loss=losses[:warmup], steps=steps_of(*losses[warmup:]))
                for rank, losses in enumerate((first, second))
            ]
        )

    return course


def test_losses_are_means_over_ranks_from_the_warm_up_on(losses_of) -> None:
    assert losses_of([4.0, 3.0, 2.0], [2.0, 2.0, 1.0], warmup=1) == ((3.0, 2.5, 1.5), 1)
    assert losses_of([], []) == ((), 1)


def test_losses_end_where_one_is_not_finite(losses_of) -> None:
    assert losses_of([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, None, 1.0]) == ((4.0, 3.0), 1)
    assert losses_of([None, 1.0], [1.0, 1.0]) == ((), 1)


@pytest.mark.parametrize(
    ("steps", "points", "every"),
    [(60, 60, 1), (61, 31, 2), (120, 60, 2), (121, 41, 3), (1000, 59, 17)],
)
def test_a_long_course_is_put_together_in_at_most_60_points(losses_of, steps, points, every) -> None:
    # Losses 0, 1, 2 ...: a point is the mean of `every` numbers in a row, the last of what is left.
    losses = [float(step) for step in range(steps)]
    found, each = losses_of(losses, losses)
    assert (len(found), each) == (points, every)
    assert found[0] == (every - 1) / 2
    assert found[1] == every + (every - 1) / 2
    left = losses[(points - 1) * every :]
    assert found[-1] == sum(left) / len(left)


def test_the_course_of_the_loss_is_kept(two) -> None:
    # The fixture's: warm-up 2, 1.875, then 2 - step / 8.
    run = two()
    assert run.losses == (2, 1.875, 2, 1.875, 1.75, 1.625, 1.5, 1.375)
    assert run.losses_every == 1


def test_what_is_done_once_is_told_apart(cell_of, record_of) -> None:
    cell = cell_of()
    records = [record_of(cell, rank, first_step_ns=ns) for rank, ns in enumerate((70, 90))]
    run = derive(cell, "run-1", records, an_attempt(launch_id="launch-1", startup_ns=123))
    assert (run.first_step_ns, run.startup_ns) == (90, 123)
    run = derive(cell, "run-1", [record_of(cell, rank) for rank in range(2)], None)
    assert (run.first_step_ns, run.startup_ns) == (None, None)


def test_the_ideal_bubble_is_that_of_the_schedule(two) -> None:
    run = two(work=a_work(bubble_ideal=0.25))
    assert run.bubble_ideal == 0.25
    assert two().bubble_ideal is None
    # Nobody recorded how long the stages waited: no budget that would call it transfer.
    assert run.budget is None
    assert "a pipeline's stages wait for each other" in run.absent["budget"]


def test_a_run_that_failed_has_no_accounts(two) -> None:
    run = two(outcome=Outcome.DIVERGED, reason="nan", telemetry=_sampled(600.0, 10**9, power_w=[1.0]))
    assert (run.budget, run.communication, run.ranks, run.energy_j) == (None,) * 4
    assert (run.losses, run.telemetry) == ((), {})
