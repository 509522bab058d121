"""The fields of a site profile: times as people write them, the limit of an estimate, and the signal."""

from __future__ import annotations

import pytest

from results.site import TimeLimits, seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("90s", 90), ("30m", 1800), ("2.5h", 9000), ("1d", 86_400), ("0.5s", 0.5), ("1 h", 3600)],
        # An hour is 3600 s, and a day is 86,400 s.
        *[("1h30m", 5400), ("1d 2h 3m 4s", 93_784), ("30:05", 1805), ("1:30:00", 5400), ("90:00", 5400)],
        *[("2-00", 172_800), ("1-02:03", 93_780), ("2-00:00:00", 172_800), ("1-02:03:04", 93_784)],
    ],
)
def test_seconds(text, value) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "5", "0m", "-1h", "1:2:3:4", "30m1h", "1h30", "1w", "infm", "0:00"])
def test_an_invalid_time_is_refused(text) -> None:
    with pytest.raises(ValueError, match="30m"):
        seconds(text)


@pytest.mark.parametrize(
    ("estimate_s", "limit_s"),
    [
        # 1.5 x 60 s = 90 s is less than the minimum of 10 minutes.
        (60, 600),
        # 1.5 x 1000 s = 1500 s = 25 min: already a multiple of 5 minutes.
        (1000, 1500),
        # 1.5 x 1001 s = 1501.5 s: rounded up to 30 min.
        (1001, 1800),
        # 1.5 x 7200 s = 3 h, but two are the maximum.
        (7200, 7200),
    ],
)
def test_limits_follow_the_policy(estimate_s, limit_s) -> None:
    times = TimeLimits(minimum="10m", maximum="2h", round_to="5m", safety_factor=1.5)
    assert times.limit_s(estimate_s) == limit_s
    # What is asked for at least has no margin: 61 min are rounded up to 65, and two hours are the maximum.
    assert times.limit_s(estimate_s, least_s=3660) == max(limit_s, 3900)
    assert times.limit_s(estimate_s, least_s=10_000) == 7200


def test_a_fixed_limit_is_asked_for_whatever_the_estimate() -> None:
    assert TimeLimits(fixed="30m").limit_s(1) == TimeLimits(fixed="30m").limit_s(10**6) == 1800


def test_the_signal_never_comes_before_half_of_the_time() -> None:
    assert TimeLimits(signal="2m").signal_s(3600) == 120
    assert TimeLimits(signal="2m").signal_s(180) == 90
