"""Host lists: by hand, and as scontrol writes and reads them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm.job_view import expand_hosts

NAMES = st.from_regex(r"[a-z]{1,3}(-?[a-z])?([0-9]{1,4})?(-ib|x)?", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n[1-3,07-09]", ("n1", "n2", "n3", "n07", "n08", "n09")),
        ("gpu-a[01-02]x,login", ("gpu-a01x", "gpu-a02x", "login")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("n[099-101]", ("n099", "n100", "n101")),
        ("r[0-1]n[0-2]", ("r0n0", "r0n1", "r0n2", "r1n0", "r1n1", "r1n2")),
        ("b,a,b", ("b", "a", "b")),
    ],
)
def test_expand_by_hand(text, hosts) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["n[", "n]", "n[1-", "n[a]", "n[3-1]", "n[1 ,2]", "n1 n2", "a,,b", ",a", "n[]", "n[[1]]", "n[0-8:2]"],
)
def test_what_is_no_list_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"not a|backward"):
        expand_hosts(text)


def test_a_list_of_too_many_hosts_is_refused_at_once() -> None:
    assert len(expand_hosts("n[1-65536]")) == 65_536
    with pytest.raises(ValueError, match="65536"):
        expand_hosts("n[1-65537]")
    with pytest.raises(ValueError, match="65536"):
        expand_hosts("r[1-60000]n[1-60000]")


@settings(max_examples=12)
@given(st.lists(NAMES, min_size=1, max_size=12))
def test_what_scontrol_compresses_is_read(running_lab, hosts) -> None:
    text = running_lab.command("scontrol", "show", "hostlist", ",".join(hosts)).strip()
    assert expand_hosts(text) == tuple(hosts)


@settings(max_examples=12)
@given(
    st.lists(
        st.from_regex(r"[a-z]{1,2}\[0?[1-4](-[5-9])?,[0-9]{1,3}\]", fullmatch=True), min_size=1, max_size=4
    )
)
def test_ranges_are_read_as_scontrol_reads_them(running_lab, expressions) -> None:
    text = ",".join(expressions)
    assert list(expand_hosts(text)) == running_lab.command("scontrol", "show", "hostnames", text).split()
