"""The vector of a bucket belongs to the parameters: it goes with them when buckets are formed anew."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies.compression.memory import BucketMemory
from strategies.exchange.buckets import Bucket, pieces_of

SHAPES = {"a": (2,), "b": (3,), "c": (2, 2), "d": ()}


def bucket(index: int, names: str, dtype: torch.dtype = torch.float32) -> Bucket:
    pieces = pieces_of((name, torch.Size(SHAPES[name])) for name in names)
    size = sum(piece.numel for piece in pieces)
    return Bucket(index=index, values=torch.full((size,), 7.0, dtype=dtype), pieces=pieces)


def test_a_vector_is_zero_at_first_and_then_what_was_written() -> None:
    memory, first = BucketMemory(), bucket(0, "ab")
    assert memory.of(first).tolist() == [0.0] * 5
    memory.of(first).copy_(torch.arange(5.0))
    assert memory.of(first).tolist() == [0, 1, 2, 3, 4]
    assert memory.of(bucket(1, "c")).tolist() == [0.0] * 4
    assert memory.of(first).tolist() == [0, 1, 2, 3, 4]


def test_the_vector_is_no_part_of_the_bucket() -> None:
    memory, first = BucketMemory(), bucket(0, "a")
    memory.of(first).fill_(1)
    assert first.values.tolist() == [7, 7]


def test_parts_go_with_their_parameters_into_new_buckets() -> None:
    memory = BucketMemory()
    memory.of(bucket(0, "ab")).copy_(torch.tensor([1.0, 2, 3, 4, 5]))
    memory.of(bucket(1, "cd")).copy_(torch.tensor([6.0, 7, 8, 9, 10]))
    assert memory.of(bucket(0, "db")).tolist() == [10, 3, 4, 5]
    assert memory.of(bucket(1, "c")).tolist() == [6, 7, 8, 9]
    assert memory.of(bucket(2, "a")).tolist() == [1, 2]


def test_the_type_is_the_buckets_own() -> None:
    memory = BucketMemory()
    assert memory.of(bucket(0, "a", torch.float64)).dtype == torch.float64


def test_vectors_name_the_pieces() -> None:
    memory = BucketMemory()
    kept = memory.of(bucket(3, "ad"))
    ((index, pieces, vector),) = memory.vectors()
    assert (index, [piece.name for piece in pieces]) == (3, ["a", "d"])
    assert vector is kept


def test_a_state_is_a_copy_by_name_and_shape() -> None:
    memory = BucketMemory()
    memory.of(bucket(0, "ac")).copy_(torch.tensor([1.0, 2, 3, 4, 5, 6]))
    state = memory.state_dict()
    memory.of(bucket(0, "ac")).zero_()
    assert {name: part.tolist() for name, part in state["parts"].items()} == {
        "a": [1, 2],
        "c": [[3, 4], [5, 6]],
    }
    assert state["buckets"] == {0: ["a", "c"]}


def test_a_loaded_state_has_its_buckets_at_once() -> None:
    memory, fresh = BucketMemory(), BucketMemory()
    memory.of(bucket(1, "ac")).copy_(torch.tensor([1.0, 2, 3, 4, 5, 6]))
    memory.of(bucket(0, "d")).fill_(7)
    fresh.load_state_dict(memory.state_dict())
    assert [{index: vector.tolist() for index, _, vector in one.vectors()} for one in (fresh, memory)] == [
        {1: [1, 2, 3, 4, 5, 6], 0: [7]}
    ] * 2
    assert fresh.of(bucket(1, "ac")) is next(vector for index, _, vector in fresh.vectors() if index == 1)


def test_all_of_it_can_be_scaled() -> None:
    memory = BucketMemory()
    memory.of(bucket(0, "ad")).fill_(3)
    memory.of(bucket(0, "d"))
    memory.scale(0.5)
    assert {name: part.tolist() for name, part in memory.state_dict()["parts"].items()} == {
        "a": [1.5, 1.5],
        "d": 1.5,
    }


def test_a_loaded_state_goes_on_where_it_was_saved() -> None:
    saved = {"a": torch.tensor([1.0, 2]), "d": torch.tensor(3.0)}
    memory = BucketMemory()
    memory.of(bucket(0, "abd")).fill_(9)
    memory.load_state_dict({"parts": saved, "buckets": {}})
    saved["d"].fill_(4)
    kept = memory.of(bucket(0, "abd"))
    assert kept.tolist() == [1, 2, 0, 0, 0, 3]
    kept.fill_(8)
    assert saved["a"].tolist() == [1, 2]


def test_a_state_between_two_distributions_has_the_parts_that_have_no_bucket_yet() -> None:
    memory = BucketMemory()
    memory.of(bucket(0, "abcd")).copy_(torch.arange(10.0))
    memory.of(bucket(0, "b"))
    state = memory.state_dict()["parts"]
    assert {name: state[name].flatten().tolist() for name in sorted(state)} == {
        "a": [0, 1],
        "b": [2, 3, 4],
        "c": [5, 6, 7, 8],
        "d": [9],
    }


@given(st.lists(st.permutations("abcd"), min_size=1, max_size=4), st.lists(st.integers(1, 3), max_size=2))
def test_no_part_is_lost_in_any_sequence_of_distributions(orders, cuts) -> None:
    memory = BucketMemory()
    written = {name: 0.0 for name in "abcd"}
    for step, order in enumerate(orders):
        borders = [0, *sorted(set(cuts)), 4] if step % 2 else [0, 4]
        for index, (start, end) in enumerate(pairwise(borders)):
            some = bucket(index, "".join(order[start:end]))
            kept = memory.of(some)
            for piece in some.pieces:
                assert (piece.of(kept) == written[piece.name]).all(), (step, piece.name)
                written[piece.name] += ord(piece.name)
                piece.of(kept).add_(ord(piece.name))


def test_a_state_from_host_memory_moves_to_the_device_of_its_bucket() -> None:
    memory, resumed = BucketMemory(), BucketMemory()
    first = bucket(0, "ab")
    memory.of(first)
    resumed.load_state_dict(memory.state_dict())
    there = replace(first, values=first.values.to("meta"))
    assert resumed.of(there).device == there.values.device
    assert resumed.of(there) is resumed.of(there)
