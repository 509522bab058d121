"""Numbers as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports import text
from results.statistics import Metric


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (0, "0 ns"),
        (812, "812 ns"),
        (12_340, "12.3 us"),
        (999_700, "1.00 ms"),
        (12_345_678, "12.3 ms"),
        (1_500_000_000, "1.50 s"),
        (-2_500_000, "-2.50 ms"),
        (125_000_000_000, "2 min 05 s"),
        (12_000_000_000_000, "3 h 20 min"),
    ],
)
def test_a_duration_has_the_unit_that_gives_it_few_digits(ns, shown) -> None:
    assert text.duration(ns) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0 B"), (512, "512 B"), (102_236_160, "97.5 MiB"), (8 * 2**30, "8.00 GiB")]
)
def test_sizes_are_in_units_of_1024(value, shown) -> None:
    assert text.size(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456, "0.123 images/s"),
        (12.5, "12.5 images/s"),
        (1234.4, "1,234 images/s"),
        (2.5e6, "2.50 M images/s"),
    ],
)
def test_rates_keep_whole_digits_up_to_a_hundred_thousand(value, shown) -> None:
    assert text.rate(value, "images") == shown


def test_counts_shares_and_prefixes() -> None:
    assert text.count(1, "run") == "1 run"
    assert text.count(1500, "run") == "1,500 runs"
    assert text.percent(0.9412) == "94.1 %"
    assert text.percent(-0.0001) == "0.0 %"
    assert text.si(4.12e9, "FLOP") == "4.12 GFLOP"
    assert text.moment("2026-01-02T03:04:05.678Z") == "2026-01-02 03:04 UTC"


def test_below_six_runs_the_interval_is_called_a_range_and_never_95_percent() -> None:
    figure = Metric(value=12.34e6, unit="ns", low=12.1e6, high=12.6e6, samples=3, interval="range")
    assert str(text.metric(figure)) == "12.3 ms (12.1 to 12.6, range of 3)"


def test_from_six_runs_on_the_interval_says_its_confidence() -> None:
    figure = Metric(value=0.941, unit="ratio", low=0.92, high=0.953, samples=6, interval="t95-runs")
    assert str(text.metric(figure)) == "94.1 % (92.0 to 95.3, 95 % of 6 runs)"


def test_one_run_has_no_interval_and_says_so() -> None:
    figure = Metric(value=1280.0, unit="images/s", low=None, high=None, samples=1, interval=None)
    assert str(text.metric(figure)) == "1,280 images/s (1 run)"


def test_the_ends_of_an_interval_have_the_unit_of_the_value() -> None:
    # The low end alone would be 990 us.
    figure = Metric(value=1.01e6, unit="ns", low=0.99e6, high=1.03e6, samples=3, interval="range")
    assert text.metric(figure).ends == "0.99 to 1.03"


def test_a_narrow_interval_gets_the_digits_that_tell_its_ends_apart() -> None:
    figure = Metric(value=12.33e6, unit="ns", low=12.32e6, high=12.34e6, samples=3, interval="range")
    # With three digits both ends would read 12.3.
    assert str(text.metric(figure)) == "12.33 ms (12.32 to 12.34, range of 3)"


def test_on_a_cpu_sizes_count_ranks_and_say_so() -> None:
    assert text.devices_word({"cpu"}) == "ranks (CPU)"
    assert text.devices_word({"cuda"}) == "GPUs"
    assert text.devices_word({"cpu", "cuda"}) == "GPUs or ranks (CPU)"
    assert text.devices(1, "cpu") == "1 rank (CPU)"
    assert text.devices(8, "cuda") == "8 GPUs"


@given(st.floats(min_value=1, max_value=9.9e10))
def test_a_duration_read_back_is_within_half_a_percent(ns) -> None:
    number, unit = text.duration(ns).split(" ")
    read = float(number.replace(",", "")) * {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert math.isclose(read, ns, rel_tol=0.0051)


@given(st.floats(min_value=-1e15, max_value=1e15))
def test_a_number_is_never_minus_zero_and_is_near_its_value(value) -> None:
    shown = text.number(value)
    assert not (shown.startswith("-") and float(shown.replace(",", "")) == 0)
    assert math.isclose(float(shown.replace(",", "")), value, rel_tol=0.0051, abs_tol=1e-9)


def test_items_with_commas_are_set_apart_by_semicolons() -> None:
    assert text.listed(["ddp"]) == "ddp"
    assert text.listed(["ddp", "fsdp", "zero1", "zero2"]) == "ddp, fsdp, zero1 and zero2"
    assert text.listed(["ddp", "fsdp", "zero1", "zero2", "tp"]) == "ddp, fsdp, zero1 and 2 more"
    assert text.listed(["ddp, ring", "fsdp", "zero1"], last=", ") == "ddp, ring; fsdp; zero1"
