"""Times as Slurm takes and prints them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.cluster import slurm_seconds
from slurm.script import slurm_time


@pytest.mark.parametrize(
    ("limit_s", "text"),
    [
        (1, "0-00:01:00"),
        (60, "0-00:01:00"),
        (61, "0-00:02:00"),
        (3540, "0-00:59:00"),
        (5400, "0-01:30:00"),
        (86_399, "1-00:00:00"),
        (90_060, "1-01:01:00"),
    ],
)
def test_slurm_time_is_in_whole_minutes_rounded_up(limit_s, text) -> None:
    assert slurm_time(limit_s) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30", 1800),
        ("30:05", 1805),
        ("2:00:01", 7201),
        ("1-00", 86_400),
        ("1-02", 93_600),
        ("1-02:03", 93_780),
        ("7-01:02:03", 608_523),
        ("infinite", None),
        ("UNLIMITED", None),
        ("n/a", None),
        ("", None),
    ],
)
def test_slurm_seconds(text, value) -> None:
    assert slurm_seconds(text) == value


@given(st.integers(1, 10**6))
def test_there_and_back_is_the_same_to_the_minute(minutes) -> None:
    assert slurm_seconds(slurm_time(minutes * 60)) == minutes * 60
