from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.errors import BenchError, GpuCountsError
from results.notation import gpu_counts


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", (1,)),
        ("1..256", (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ("1..96", (1, 2, 4, 8, 16, 32, 64, 96)),
        ("3..20", (3, 6, 12, 20)),
        ("8..8", (8,)),
        ("1,2,96", (1, 2, 96)),
        ("96,2,1,2", (1, 2, 96)),
        ("8..64:8", (8, 16, 24, 32, 40, 48, 56, 64)),
        ("1..4, 6 ,8..12:2", (1, 2, 4, 6, 8, 10, 12)),
        ("1000000", (1_000_000,)),
    ],
)
def test_counts_are_ascending_and_distinct(text, counts) -> None:
    assert gpu_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8..1", "a range goes up, and 1 is less than 8; write 1..8"),
        ("0", "counts start at 1, not 0"),
        ("0..4", "counts start at 1, not 0"),
        ("1..10:4", "steps of 4 from 1 do not meet 10; write 1..9:4 or 1..13:4"),
        ("1..8:0", "a step is at least 1, not 0"),
        ("1000001", "1000001 is more than 1000000, the most that is planned"),
        ("", "'' is not a count or a range"),
        ("1,,2", "'' is not a count or a range"),
        ("-4", "'-4' is not a count or a range"),
        ("1...8", "'1...8' is not a count or a range"),
        ("four", "'four' is not a count or a range"),
        ("2.5", "'2.5' is not a count or a range"),
        ("4:2", "'4:2' is not a count or a range"),
        ("1..8:2:2", "'1..8:2:2' is not a count or a range"),
        ("\u0663", "'\u0663' is not a count or a range"),
        ("9" * 5000, "is not a count or a range"),
    ],
)
def test_a_refusal_quotes_the_text_and_the_rule(text, message) -> None:
    with pytest.raises(GpuCountsError) as error:
        gpu_counts(text)
    assert str(error.value).startswith(f"--gpus {text!r}: ")
    assert message in str(error.value)


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_doubling_range_has_both_ends_and_doubles_between(first, more) -> None:
    counts = gpu_counts(f"{first}..{first + more}")
    assert counts[0] == first
    assert counts[-1] == first + more
    assert all(second == 2 * one for one, second in pairwise(counts[:-1]))
    assert len(counts) < 2 or counts[-1] <= 2 * counts[-2]


@given(st.integers(1, 500), st.integers(1, 50), st.integers(0, 100))
def test_a_stepped_range_is_the_range_of_python(first, step, steps) -> None:
    last = first + step * steps
    assert gpu_counts(f"{first}..{last}:{step}") == tuple(range(first, last + 1, step))


@given(st.lists(st.integers(1, 1_000_000), min_size=1))
def test_a_list_is_sorted_and_without_doubles(counts) -> None:
    assert gpu_counts(",".join(map(str, counts))) == tuple(sorted(set(counts)))


@given(st.text(alphabet="0123456789.:,- x", max_size=12))
def test_no_text_fails_without_a_message(text) -> None:
    try:
        counts = gpu_counts(text)
    except BenchError as error:
        if repr(text) not in str(error):
            pytest.fail(f"the message does not quote {text!r}: {error}")
    else:
        assert counts == tuple(sorted(set(counts)))
        assert counts[0] >= 1
