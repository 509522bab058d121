"""Rates of links written as text, and the labels that contain them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.cell import exchange_label, label
from results.errors import UsageError
from results.notation import link_text, read_link


@pytest.mark.parametrize(
    ("text", "mbit_per_s", "canonical"),
    [
        ("none", None, "none"),
        ("100mbit", 100.0, "100mbit"),
        ("1gbit", 1000.0, "1gbit"),
        ("1000mbit", 1000.0, "1gbit"),
        ("1.0gbit", 1000.0, "1gbit"),
        ("2.5gbit", 2500.0, "2.5gbit"),
        ("0.5gbit", 500.0, "500mbit"),
        ("10GBIT", 10000.0, "10gbit"),
        ("999.999mbit", 999.999, "999.999mbit"),
        ("1234.567mbit", 1234.567, "1.234567gbit"),
        ("1mbit", 1.0, "1mbit"),
        ("1000gbit", 1e6, "1000gbit"),
    ],
)
def test_a_rate_is_read_and_has_one_text(text, mbit_per_s, canonical) -> None:
    assert read_link(text) == mbit_per_s
    assert link_text(mbit_per_s) == canonical
    assert read_link(canonical) == mbit_per_s


def test_capitals_and_spaces_around_do_not_matter() -> None:
    assert read_link(" 1GBit ") == 1000.0
    assert read_link("None") is None


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "1 gbit", "-1gbit", "1e3mbit", "gbit", "1gbit/s"])
def test_an_invalid_rate_is_refused_with_valid_ones(text) -> None:
    with pytest.raises(UsageError) as error:
        read_link(text)
    assert str(error.value) == (
        f"--link takes none or a rate like 100mbit, 1gbit, 2.5gbit (bits a second), not {text!r}"
    )


@pytest.mark.parametrize("text", ["0mbit", "0.999mbit", "1000.001gbit", "9999999gbit"])
def test_a_rate_beyond_reason_is_refused_with_the_ends(text) -> None:
    with pytest.raises(UsageError) as error:
        read_link(text)
    assert str(error.value) == f"--link is from 1mbit to 1000gbit, not {text!r}"


@given(st.integers(1000, 10**9))
def test_every_rate_to_the_kbit_survives_its_text(kbit_per_s) -> None:
    mbit_per_s = kbit_per_s / 1000
    assert read_link(link_text(mbit_per_s)) == mbit_per_s


@dataclass(frozen=True)
class Point:
    strategy: str = "ddp"
    compression: str = "none"
    collective: str = "default"
    link: str = "none"


@pytest.mark.parametrize(
    ("point", "short", "full"),
    [
        (Point(), "ddp", "ddp"),
        (Point(strategy="ddp:bucket_mb=50.0"), "ddp:bucket_mb=50.0", "ddp:bucket_mb=50.0"),
        (Point(compression="topk:0.01"), "ddp + topk:0.01", "ddp + topk:0.01"),
        (Point(collective="ring"), "ddp, ring", "ddp, ring"),
        (Point(link="1gbit"), "ddp", "ddp, 1gbit"),
        (
            Point(compression="topk:0.01", collective="ring", link="1gbit"),
            "ddp + topk:0.01, ring",
            "ddp + topk:0.01, ring, 1gbit",
        ),
    ],
)
def test_a_label_names_what_is_not_default(point, short, full) -> None:
    assert exchange_label(point) == short
    assert label(point) == full
