"""Counters of a run from what its ranks have on record, by hand."""

from __future__ import annotations

import hashlib

import pytest

from results.record import Buckets


def test_buckets_are_the_busiest_ranks_and_early_ones_those_of_the_rank_that_overlaps_least(two) -> None:
    run = two(buckets=(Buckets(started=[0, 4], early=[0, 3]), Buckets(started=[0, 5], early=[0, 1])))
    assert (run.exchange_buckets, run.exchange_buckets_early) == (2.5, 0.5)


def test_what_is_left_of_backward_is_a_mean_over_buckets_of_the_rank_with_least(two) -> None:
    more = Buckets(started=[0, 3], early=[0, 2], left=[[], [0.75, 0.5, 0.25]])
    less = Buckets(started=[1, 1], early=[0, 1], left=[[0.0], [0.5]])
    assert two(buckets=(more, less)).exchange_backward_left == 0.25
    unknown = Buckets(started=[1, 1], early=[0, 1])
    assert two(buckets=(more, unknown)).exchange_backward_left is None
    assert two(buckets=(more, None)).exchange_backward_left is None


@pytest.mark.parametrize(
    ("second", "buckets"), [(None, None), (Buckets(started=[]), None), (Buckets(started=[4]), 4)]
)
def test_what_one_rank_does_not_know_nobody_knows(two, second, buckets) -> None:
    run = two(buckets=(Buckets(started=[4], early=[3]), second))
    assert (run.exchange_buckets, run.exchange_buckets_early) == (buckets, None)


def test_unlike_replicas_have_a_hash_of_all_of_theirs(two) -> None:
    assert two(first_hash="aa").first_hash == "aa"
    assert two(first_hash=("aa", None)).first_hash is None
    expected = hashlib.blake2b(b"aa bb", digest_size=8).hexdigest()
    assert two(first_hash=("aa", "bb")).first_hash == expected


def test_the_loss_after_a_fixed_number_of_samples(two) -> None:
    """Steps 11 to 20 of both ranks: fourteen of warm-up, six measured ones."""
    assert two(warmup_loss=[9.0] * 10 + [2.0] * 4).loss_fixed == pytest.approx(
        (4 * 2.0 + sum(two().losses[2:8])) / 10
    )
    assert two().loss_fixed is None, "eight steps are too few"
    assert two(warmup_loss=[9.0] * 10 + [2.0, None, 2.0, 2.0]).loss_fixed is None
