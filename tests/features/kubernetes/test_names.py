"""Names: whatever a study is called, its objects have names that Kubernetes takes, and different ones."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.features.kubernetes.profile import (
    check_key,
    check_label,
    check_subdomain,
    check_value,
    object_name,
)

# RFC 1035, section 2.3.1, in small letters: what a service may be called, and so any other object.
RFC_1035 = re.compile(r"\A[a-z](?:[a-z0-9-]*[a-z0-9])?\Z")


@given(st.text() | st.text("aB9-._ ", max_size=80))
def test_every_text_has_a_name(text) -> None:
    name = object_name(text)
    assert RFC_1035.match(name)
    # The longest that is put behind a name: a dash and ten characters of a revision.
    assert len(f"{name}-1234567890") <= 63


@given(st.lists(st.text("aAbB-._1", max_size=60), unique=True, min_size=2, max_size=2))
def test_different_texts_have_different_names(texts) -> None:
    assert object_name(texts[0]) != object_name(texts[1])


def digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("demo-ab12-0001-2x8", "demo-ab12-0001-2x8"),
        ("a" * 52, "a" * 52),
        # 52 less a dash and 8 digits: 43.
        ("a" * 53, f"{'a' * 43}-{digits('a' * 53)}"),
        ("My study.v2", f"my-study-v2-{digits('My study.v2')}"),
        ("2-nodes", f"bench-2-nodes-{digits('2-nodes')}"),
        ("", f"bench-{digits('')}"),
        ("a-", f"a-{digits('a-')}"),
        # No dash is left at the cut.
        ("a" * 42 + "-" + "b" * 20, f"{'a' * 42}-{digits('a' * 42 + '-' + 'b' * 20)}"),
    ],
)
def test_names_say_what_they_are_of(text, name) -> None:
    assert object_name(text) == name


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (check_label, ["a", "0", "a-b", "a" * 63], ["", "A", "-a", "a-", "a.b", "a_b", "a" * 64, "a\n"]),
        (
            check_subdomain,
            ["a", "a.b-c.d", ".".join(["a" * 63] * 3)],
            ["", "a..b", ".a", "a.", "a.-b", "A.b", "a" * 254, "a/b"],
        ),
        (
            check_key,
            ["a", "A_b.c-d", "nvidia.com/gpu", "a/" + "b" * 63],
            ["", "/a", "a/", "a/b/c", "A/b", "a b", "-a", "a/" + "b" * 64],
        ),
        (check_value, ["", "a", "A_b.c-d", "1" * 63], ["-", "a b", "a/b", "a-", "1" * 64, "a\n"]),
    ],
)
def test_rules(check, good, bad) -> None:
    for text in good:
        check(text)
    for text in bad:
        with pytest.raises(ValueError, match="is not a"):
            check(text)
