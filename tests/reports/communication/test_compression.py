"""Bytes, loss and break-even against the dense exchange, worked out by hand."""

from __future__ import annotations

import pytest

from reports.analysis.exchange import (
    ANY_RATE,
    BY_NODES,
    FEW_RUNS,
    NO_FEWER,
    NOT_APART,
    NOT_EXPOSED,
    NOT_RECORDED,
    SLOWER_TRANSFER,
    break_even,
    exchange_parts,
    loss_guard,
    wire_bytes,
)
from results.record import Training


@pytest.mark.parametrize(
    ("payloads", "sent"),
    [
        ({("allreduce", 4): 1000.0}, 1500.0),
        # Each over its own group: 2 x 1/2 of 1000, and 7 times 10.
        ({("allreduce", 2): 1000.0, ("_allgather_base", 8): 10.0}, 1070.0),
        # A ring of 4 ranks: 2 x 3 sends of a quarter carry what an all-reduce does.
        ({("send", 4): 6 * 250.0, ("recv", 4): 6 * 250.0}, 1500.0),
        ({}, None),
        ({("allreduce", 4): 1.0, ("gossip", 4): 1.0}, None),
    ],
)
def test_wire_bytes_are_those_that_the_algorithm_sends(payloads, sent) -> None:
    assert wire_bytes(payloads, "nccl") == pytest.approx(sent)


@pytest.fixture
def exchanged(new_cell, new_run, new_communication, new_operation, figures_of):
    """A cell of 4 ranks by step and exposed time in ms and its operation."""

    def made(step, exposed, operation, payload, *, run=None, **fields):
        cell = new_cell(4, **fields)
        recorded = new_communication([new_operation(operation, 4, payload)]) if operation else None
        result = new_run(cell, step, exposed, communication=recorded, **(run or {}))
        return figures_of(cell, [result])

    return made


def test_break_even_by_hand(exchanged) -> None:
    dense = exchanged(20.0, 12.0, "allreduce", 4e6)
    topk = exchanged(14.0, 2.0, "_allgather_base", 80e3, compression="topk:0.01")
    # On the wire 6 MB and 0.24 MB; apart from the transfer 8 ms and 12 ms: 5.76 MB in 4 ms are 11.52 Gbit/s.
    assert break_even(topk, dense, "faster") == "below 11.5 Gbit/s"
    # At that bandwidth the two steps are equally long: 8 + 6 MB / B = 12 + 0.24 MB / B.
    bytes_per_ms = 11520e6 / 8 / 1e3
    assert 8 + 6e6 / bytes_per_ms == pytest.approx(12 + 0.24e6 / bytes_per_ms)


def test_more_bytes_never_pay(exchanged) -> None:
    dense = exchanged(20.0, 12.0, "allreduce", 4e6)
    # Half the payload, gathered by 3 others, is as much as the all-reduce carries.
    assert break_even(exchanged(10.0, 5.0, "allgather", 2e6), dense, "faster") == NO_FEWER
    assert break_even(exchanged(30.0, 5.0, "allgather", 1.99e6), dense, "slower").startswith("below ")


def test_a_transfer_below_nothing_is_nothing(exchanged) -> None:
    dense = exchanged(20.0, 12.0, "allreduce", 4e6)
    # 12 ms apart from its transfer, not 13: 3 MB in 4 ms.
    assert break_even(exchanged(12.0, -1.0, "allreduce", 2e6), dense, "faster") == "below 6.00 Gbit/s"


def test_unmeasured_exchanges_have_no_break_even(exchanged) -> None:
    dense = exchanged(20.0, 12.0, "allreduce", 4e6)
    assert break_even(exchanged(20.0, 12.0, None, 0.0), dense, "faster") == NOT_RECORDED
    assert break_even(dense, exchanged(20.0, 12.0, None, 0.0), "faster") == NOT_RECORDED
    assert break_even(exchanged(20.0, None, "allreduce", 2e6), dense, "faster") == NOT_EXPOSED


@pytest.mark.parametrize(
    ("collective", "recorded", "by_nodes"),
    [
        ("hierarchical:via=leaders", None, True),
        ("of-another-package", Training(exchanges_by_nodes=True), True),
        ("hierarchical", Training(exchanges_by_nodes=False), False),
        ("ring", Training(), False),
    ],
)
def test_an_exchange_by_nodes_projects_nothing(exchanged, collective, recorded, by_nodes) -> None:
    dense = exchanged(20.0, 12.0, "allreduce", 4e6)
    found = exchanged(30.0, 1.0, "allreduce", 2e6, collective=collective, run={"training": recorded})
    assert (break_even(found, dense, "slower") == BY_NODES) is by_nodes


@pytest.fixture
def trained(new_cell, new_run, figures_of):
    """A cell whose runs kept these losses, each with the steps between them."""

    def made(*kept):
        cell = new_cell(2)
        runs = [
            new_run(cell, losses=tuple(losses), losses_every=every, first_steps=first)
            for losses, every, *rest in kept
            for first in (rest or [None])
        ]
        return figures_of(cell, runs)

    return made


def test_losses_are_compared_at_the_last_step_that_all_kept(trained) -> None:
    # Means of two steps that end at 2, 4, 6 and 2, 4: the last of both is 4.
    guard = loss_guard(trained(([4.0, 3.0, 2.0], 2)), trained(([4.0, 2.5], 2)))
    assert guard == "3.000 against 2.500 after 4 steps"


def test_means_over_unlike_steps_are_not_compared(trained) -> None:
    assert loss_guard(trained(([4.0, 3.0, 2.0], 2)), trained(([4.0, 3.5], 3))) is None
    # Both end at step 6, of which one is the mean of the last two and the other of the last three.
    assert loss_guard(trained(([4.0, 3.0], 2, 2)), trained(([4.0], 3, 3))) is None


def test_steps_that_a_proof_checks_count(trained) -> None:
    # Four steps come before the one's first loss, three before the other's: step 5 is the first they share.
    guard = loss_guard(trained(([2.0, 1.0], 1, 4)), trained(([4.0, 2.5, 1.5], 1, 3)))
    assert guard == "1.000 against 1.500 after 6 steps"


def test_the_loss_is_the_mean_of_the_runs_at_that_step(trained) -> None:
    own = trained(([4.0, 3.0], 1), ([4.0, 1.0, 0.1], 1))
    guard = loss_guard(own, trained(([4.0, 2.5, 0.2], 1)))
    assert guard == "2.000 against 2.500 after 2 steps"


def test_runs_without_losses_guard_nothing(trained) -> None:
    assert loss_guard(trained(([], 1)), trained(([1.0], 1))) is None
    assert loss_guard(trained(([1.0], 1), ([], 1)), trained(([1.0], 1))) is None


def test_a_row_carries_what_it_costs_and_spares(
    new_cell, new_run, new_communication, new_operation, study_of
) -> None:
    def runs(cell, step, exposed, payload):
        recorded = new_communication([new_operation("allreduce", 2, payload)])
        fields = {"losses": (2.0, 1.0), "exchange_payload_bytes": round(payload)}
        return [new_run(cell, step, exposed, communication=recorded, **fields) for _ in range(3)]

    dense, small = new_cell(2), new_cell(2, compression="bf16")
    study = study_of({dense: runs(dense, 20.0, 12.0, 4e6), small: runs(small, 18.0, 6.0, 2e6)})
    (part,) = exchange_parts(study)
    first, second = part.rows
    assert (first.loss_guard, first.break_even) == (None, None)
    assert second.loss_guard == "1.000 against 1.000 after 2 steps"
    # 2 MB less in 12 - 8 ms more.
    assert second.break_even == "below 4.00 Gbit/s"


@pytest.fixture
def projected(new_cell, new_run, new_communication, new_operation, study_of):
    """The break-even of bf16 against a dense exchange of 20 ms, 12 of them exposed; times in ms."""

    def made(steps, exposed, *, payload=2e6, dense=(19.8, 20.0, 20.2)):
        def runs(cell, each, exposed_ms, payload):
            recorded = new_communication([new_operation("allreduce", 2, payload)])
            return [new_run(cell, step, exposed_ms, communication=recorded) for step in each]

        plain, small = new_cell(2), new_cell(2, compression="bf16")
        study = study_of({plain: runs(plain, dense, 12.0, 4e6), small: runs(small, steps, exposed, payload)})
        return exchange_parts(study)[0].rows[1].break_even

    return made


def test_a_break_even_is_stated_where_the_runs_are_apart(projected) -> None:
    # 2 MB less; apart from the transfer 12 and 20 ms instead of 8.
    assert projected([17.9, 18.0, 18.1], 6.0) == "below 4.00 Gbit/s"
    assert projected([25.9, 26.0, 26.1], 6.0) == "below 1.33 Gbit/s"
    # 6 ms instead of 8.
    assert projected([11.9, 12.0, 12.1], 6.0) == ANY_RATE


@pytest.mark.parametrize("exposed", [6.0, 13.0])
def test_overlapping_runs_have_no_break_even(projected, exposed) -> None:
    assert projected([19.0, 20.0, 21.0], exposed) == NOT_APART


@pytest.mark.parametrize("exposed", [6.0, 13.0])
def test_fewer_than_three_runs_of_either_have_no_break_even(projected, exposed) -> None:
    assert projected([18.0, 18.0], exposed) == FEW_RUNS
    assert projected([18.0, 18.0, 18.0], exposed, dense=(20.0, 20.0)) == FEW_RUNS


def test_a_slower_transfer_of_fewer_bytes_has_no_break_even(projected) -> None:
    # 7 ms instead of 8 apart from the transfer, which takes 17 ms for half of the bytes.
    assert projected([24.0, 24.0, 24.0], 17.0) == SLOWER_TRANSFER


def test_sending_no_fewer_bytes_is_decided_without_runs(projected) -> None:
    assert projected([18.0], 6.0, payload=4e6) == NO_FEWER
    assert projected([20.0, 20.0, 20.0], 6.0, payload=4e6) == NO_FEWER


def test_unlike_conditions_project_nothing(new_cell, new_run, study_of) -> None:
    dense, small = new_cell(2), new_cell(2, compression="bf16")
    other = new_run(dense).environment
    unlike = type(other)(**{**{name: getattr(other, name) for name in other.__struct_fields__}, "torch": "2"})
    study = study_of(
        {
            dense: [new_run(dense, losses=(1.0,))],
            small: [new_run(small, losses=(1.0,), environment=unlike, fingerprint="other")],
        }
    )
    (part,) = exchange_parts(study)
    assert part.rows[1].dense is not None
    assert (part.rows[1].break_even, part.rows[1].loss_guard) == (None, None)
