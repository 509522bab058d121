"""The orders that `bench train` accepts, and its refusals with the fix."""

from __future__ import annotations

import pytest

from harness.features.train.order import Target, TrainOrder, read_target
from results.errors import SchemaError, UsageError
from results.plan import Order, read_values


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "--epochs N and --steps N: neither was given"),
        ({"epochs": 1, "steps": 5}, "--epochs N and --steps N: both were given"),
        ({"steps": 0}, "--steps is at least 1, not 0"),
        ({"epochs": 1, "keep": 0}, "--keep is at least 1, not 0"),
        ({"epochs": 1, "restarts": -1}, "--restarts is at least 0, not -1"),
        ({"epochs": 1, "target": "val_accuracy=0.9"}, "write METRIC>=VALUE or METRIC<=VALUE"),
        ({"epochs": 1, "target": "val_loss>=2"}, "a target for val_loss needs <=; write val_loss<=2"),
        ({"epochs": 1, "target": "loss<=nan"}, "'nan' is not a finite number"),
        ({"epochs": 1, "warmup_steps": 5}, "add --schedule cosine"),
        ({"steps": 5, "warmup_steps": 5, "schedule": "cosine"}, "leaves nothing of 5 steps"),
        ({"epochs": 1, "elastic": (2, 1)}, "MIN:MAX nodes with 1 <= MIN <= MAX"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused(fields, words) -> None:
    with pytest.raises(UsageError) as refused:
        TrainOrder(**fields)
    assert words in str(refused.value)


def test_a_target_is_reached_on_its_own_side() -> None:
    assert read_target(" val_accuracy >= 0.97 ") == Target("val_accuracy", 0.97)
    assert Target("val_accuracy", 0.97).reached(0.98)
    assert not Target("val_accuracy", 0.97).reached(0.96)
    assert Target("loss", 2.0).reached(2.0)
    assert not Target("loss", 2.0).reached(float("nan"))


def test_what_is_watched_follows_from_what_was_asked_for() -> None:
    assert TrainOrder(steps=1).watched is None
    assert TrainOrder(steps=1, patience=2).watched == "val_loss"
    assert TrainOrder(steps=1, patience=2, target="val_accuracy>=0.9").watched == "val_accuracy"
    assert TrainOrder(steps=1, patience=2, best="loss").watched == "loss"
    assert not TrainOrder(steps=1, patience=2, best="loss").validates
    assert TrainOrder(steps=1, target="val_loss<=2").validates


def test_orders_end_alike_that_differ_in_what_is_kept_alone() -> None:
    order = TrainOrder(steps=10)
    assert order.ends_as(TrainOrder(steps=10, keep=1, checkpoint_every=2, restarts=0))
    assert not order.ends_as(TrainOrder(steps=11))


STORED = {
    **{"epochs": 3, "steps": None, "checkpoint_every": 50, "keep": 2, "best": "val_accuracy", "patience": 4},
    **{"target": "val_accuracy>=0.97", "validate_every": 25, "schedule": "cosine", "warmup_steps": 10},
    **{"restarts": 5, "elastic": [1, 2], "batch_rule": "rate"},
}
"""Plans of version 3 and later store these values."""


def test_a_stored_order_reads_to_the_same_for_ever() -> None:
    fields = {**STORED, "elastic": (1, 2)}
    assert read_values(STORED, TrainOrder) == TrainOrder(**fields)
    assert set(STORED) == set(TrainOrder.__struct_fields__)
    assert read_values(STORED, TrainOrder).stored == Order(kind="trained", values=STORED)


def test_a_damaged_order_names_what_to_do() -> None:
    with pytest.raises(SchemaError, match="repeat the command that wrote it"):
        read_values({"steps": "x"}, TrainOrder)
