"""`powersgd` against linear algebra: projections, low ranks, and the best approximation there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exchanging import CPU, an_exchange
from rank_builders import batches
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from strategies import Trainer, TrainSettings
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.gradient_exchange import GradientExchange
from strategies.snapshot import Snapshot

Named = dict[str, Tensor]


def exchanged(exchange: GradientExchange, share: Named) -> Named:
    """The sums, in one bucket."""
    pieces = pieces_of((name, value.shape) for name, value in share.items())
    values = torch.cat([value.flatten() for value in share.values()])
    exchange.sum_shares(Bucket(index=0, values=values, pieces=pieces))
    return {piece.name: piece.of(values) for piece in pieces}


def factor_of(exchange: GradientExchange, name: str) -> Tensor:
    compressor = cast(dict[str, dict[str, Tensor]], exchange.state_dict()["compressor"])
    return compressor["factors"][name]


def normal(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def of_rank_two(group: ExchangeGroup, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Share and sum; the sum over the ranks has rank 2, though the shares have not."""
    columns = torch.Size(shape[1:]).numel()
    both = normal(99, shape[0], 2) @ normal(98, 2, columns)
    apart = normal(97, shape[0], columns)
    share = (both + (1 if group.rank() == 0 else -1) * apart).view(shape).to(dtype)
    return share, exchanged(an_exchange(group, "powersgd:2"), {"w": share})["w"]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("shape", [(20, 12), (12, 20), (8, 4, 3, 3)])
def test_a_sum_of_low_rank_is_exact(threads, shape, dtype, rtol) -> None:
    (first, sums), (second, again) = threads(2, of_rank_two, shape, dtype)
    torch.testing.assert_close(sums, first + second, rtol=rtol, atol=rtol)
    assert torch.equal(sums, again)


def two_steps(group: ExchangeGroup) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Two steps without feedback: the share, the sum, the residual, and Q^T before and after."""
    exchange = an_exchange(group, "powersgd:3:feedback=false")
    exchanged(exchange, {"w": normal(50, 20, 15)})
    steps = []
    for step in range(2):
        before = factor_of(exchange, "w")
        share = normal(10 * step + group.rank(), 20, 15)
        sums = exchanged(exchange, {"w": share})["w"]
        residual = dict(exchange.residual())["w"].clone()
        steps.append((share, sums, residual, before, factor_of(exchange, "w")))
    return steps


def test_sums_are_projected_and_each_rank_keeps_what_is_left_of_its_own(threads) -> None:
    ranks = threads(3, two_steps)
    for step in range(2):
        shares, sums, residual, before, after = zip(*(rank[step] for rank in ranks), strict=True)
        whole = np.sum([share.numpy() for share in shares], axis=0)
        # No basis of the columns of M Q is compared, as signs are free; the projection onto them is one.
        basis, *_ = np.linalg.svd(whole @ before[0].numpy().T, full_matrices=False)
        projection = basis @ basis.T
        for rank in range(3):
            np.testing.assert_allclose(sums[rank], projection @ whole, rtol=0, atol=1e-12)
            left = shares[rank].numpy() - projection @ shares[rank].numpy()
            np.testing.assert_allclose(residual[rank], left, rtol=0, atol=1e-12)
            assert torch.equal(before[rank], before[0])
            # The next step begins in the rows of what was found.
            rows = np.linalg.matrix_rank(np.vstack([after[rank].numpy(), sums[rank].numpy()]), tol=1e-9)
            assert rows == 3


def approximated(group: ExchangeGroup, steps: int) -> tuple[Tensor, Tensor]:
    """Share and last sum, of the same shares again and again, without feedback."""
    exchange = an_exchange(group, "powersgd:2:feedback=false")
    share = normal(group.rank(), 16, 12) @ torch.diag(0.7 ** torch.arange(12)).double()
    for _ in range(steps):
        sums = exchanged(exchange, {"w": share})["w"]
    return share, sums


def test_warm_starts_find_the_best_approximation(threads) -> None:
    # Power iteration converges to the singular vectors of the largest singular values (Vogels et al. 2019,
    # section 3; Eckart and Young 1936: nothing of rank 2 is nearer).
    def distance(steps: int) -> tuple[float, float]:
        (first, sums), (second, _) = threads(2, approximated, steps)
        singular = np.linalg.svd((first + second).numpy(), compute_uv=False)
        return (first + second - sums).norm().item(), float(np.linalg.norm(singular[2:]))

    cold, best = distance(1)
    warm, _ = distance(30)
    assert cold > 1.05 * best
    assert warm == pytest.approx(best, rel=1e-3)


def drawn(group: ExchangeGroup) -> list[Tensor]:
    """The sums of one matrix: as it is, once more, under another name, from another seed."""
    share = normal(1, 16, 12)
    cases = [("a", 0), ("a", 0), ("b", 0), ("a", 1)]
    return [
        exchanged(an_exchange(group, "powersgd:1", seed=seed), {name: share})[name] for name, seed in cases
    ]


def test_the_first_factor_follows_from_seed_and_name(threads) -> None:
    ((sums, again, other_name, other_seed),) = threads(1, drawn)
    assert torch.equal(sums, again)
    assert not torch.allclose(sums, other_name)
    assert not torch.allclose(sums, other_seed)


SHAPES = {
    "small": (4, 4),  # (4 + 4) * 2 = 4 * 4: as it is
    "just": (4, 5),  # (4 + 5) * 2 < 4 * 5: 8 and 10 numbers in place of 20
    "filters": (8, 2, 3, 3),  # (8 + 18) * 2 < 8 * 18: 16 and 36 in place of 144
    "bias": (9,),
    "factor": (),
    "narrow": (300, 2),  # never: two columns are their own factors
}
WHOLE = ("small", "bias", "factor", "narrow")


def mixed(group: ExchangeGroup) -> tuple[Named, Named, Named, int, int]:
    """Share, sum, residual, bytes and operations of all kinds of parameters at once."""
    exchange = an_exchange(group, "powersgd:2")
    share = {
        name: normal(10 * i + group.rank(), *shape, dtype=torch.float32)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    sums = exchanged(exchange, share)
    return share, sums, dict(exchange.residual()), group.traffic.payload_bytes, group.traffic.operations


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_two_all_reduces_of_factors_and_of_what_none_would_make_smaller(threads, size) -> None:
    ranks = threads(size, mixed)
    whole = 16 + 9 + 1 + 600
    for _, sums, residual, payload, operations in ranks:
        assert payload == 4 * (whole + (8 + 16)) + 4 * (10 + 36)
        assert operations == 2
        for name in WHOLE:
            expected = torch.stack([rank[0][name] for rank in ranks]).sum(dim=0)
            torch.testing.assert_close(sums[name], expected, rtol=0, atol=1e-5)
            assert not residual[name].any()
        assert residual["just"].any()
        assert residual["filters"].any()


def warmed_up(group: ExchangeGroup, pieces: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Share, sum and residual of four steps."""
    exchange = an_exchange(group, "powersgd:1:warmup=2")
    assert exchange.ramp_steps == 2
    steps = []
    for step in range(4):
        share = normal(10 * step + group.rank(), 96)
        values, named = share.clone(), [("w", torch.Size((12, 8)))] if pieces else []
        bucket = Bucket(index=0, values=values, pieces=pieces_of(iter(named)))
        exchange.sum_shares(bucket)
        residual = [part.flatten().clone() for _, part in exchange.residual()]
        steps.append((share, values, torch.cat(residual) if residual else torch.zeros(96)))
    return steps


@pytest.mark.parametrize(("pieces", "exact_steps"), [(True, 2), (False, 4)])
def test_warmup_and_unknown_shapes_send_all(threads, pieces, exact_steps) -> None:
    first, second = threads(2, warmed_up, pieces)
    for step in range(4):
        (a, sums, residual), (b, _, _) = first[step], second[step]
        assert torch.equal(sums, a + b) == (step < exact_steps)
        assert residual.any() == (step >= exact_steps)


def after_zeros(group: ExchangeGroup) -> tuple[Tensor, Tensor]:
    """The expected and the actual sums after steps of zeros: the first rows have no gradient, as in an
    embedding whose first tokens never occur."""
    exchange = an_exchange(group, "powersgd:2")
    for _ in range(3):
        exchanged(exchange, {"w": torch.zeros(20, 12, dtype=torch.float64)})
    share = normal(1, 20, 2) @ normal(2, 2, 12)
    share[:4] = 0
    return group.size() * share, exchanged(exchange, {"w": share})["w"]


def test_a_gradient_of_zeros_does_not_end_the_power_iteration(threads) -> None:
    for expected, sums in threads(2, after_zeros):
        torch.testing.assert_close(sums, expected, rtol=0, atol=1e-10)


def drifted(group: ExchangeGroup, steps: int) -> list[float]:
    """The size of the residual, step by step, while the ranks never agree on the gradient."""
    exchange = an_exchange(group, "powersgd:1")
    share = normal(group.rank(), 6, 8)
    sizes = []
    for _ in range(steps):
        exchanged(exchange, {"w": share})
        sizes.append(dict(exchange.residual())["w"].norm().item())
    return sizes


def test_the_residual_stays_bounded_though_the_ranks_differ(threads) -> None:
    # Were the mean Q subtracted, each rank would keep its distance from the mean once more every step, all
    # 200 of them in the end. With 8 columns the sum has all 6 directions, so that each is sent in its turn.
    apart = (normal(0, 6, 8) - normal(1, 6, 8)).norm().item() / 2
    for sizes in threads(2, drifted, 200):
        assert max(sizes) < 20 * apart
        assert max(sizes[100:]) < 1.3 * max(sizes[:100])


def alone_and_beside(group: ExchangeGroup, shapes: dict[str, tuple[int, ...]]) -> tuple[Named, Named, int]:
    """Sums of a second step, of a bucket for each parameter and of one; and the calls of QR for that."""
    named = {name: normal(i, *shape, dtype=torch.float32) for i, (name, shape) in enumerate(shapes.items())}
    alone, beside = an_exchange(group, "powersgd:2"), an_exchange(group, "powersgd:2")
    for _ in range(2):
        one = {name: exchanged(alone, {name: value})[name] for name, value in named.items()}
        with patch.object(torch.linalg, "qr", wraps=torch.linalg.qr) as qr:
            together = exchanged(beside, named)
    return one, together, qr.call_count


def test_matrices_of_one_shape_have_one_qr_and_the_bits_of_each_alone(threads) -> None:
    shapes = {"a": (64, 40), "b": (30, 17), "c": (64, 40), "d": (64, 5, 8), "e": (64, 60)}
    ((one, together, calls),) = threads(1, alone_and_beside, shapes)
    assert calls == 2  # of 64 rows, and of 30
    assert all(torch.equal(one[name], together[name]) for name in shapes)


def in_half(group: ExchangeGroup) -> Tensor:
    share = {"w": normal(group.rank(), 16, 12).to(torch.bfloat16)}
    return exchanged(an_exchange(group, "powersgd:2"), share)["w"]


def test_half_precision_has_a_basis_too(threads) -> None:
    first, second = threads(2, in_half)
    assert first.dtype == torch.bfloat16
    assert first.isfinite().all()
    assert torch.equal(first, second)


# torch's PowerSGD behind our hook: the same gradients as torch alone, and what it keeps, by parameter.

OPTIMIZER = "sgd:lr=0.1:momentum=0.9"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5))


def trainer_of(strategy: str = "ddp", group: ExchangeGroup | None = None) -> Trainer:
    settings = TrainSettings(strategy=strategy, compression="torch-powersgd:2", optimizer=OPTIMIZER, seed=11)
    return Trainer(network(), F.cross_entropy, device=CPU, settings=settings, group=group or open_exchange())


def gradients(trainer: Trainer, data: Iterator[tuple[Tensor, Tensor]]) -> dict[str, list[float]]:
    trainer.compute_gradients(data)
    found = {name: value.flatten().tolist() for name, value in trainer.model.named_gradients()}
    trainer.update()
    return found


def ours(rank: int) -> list[dict[str, list[float]]]:
    trainer, data = trainer_of(), batches(rank)
    return [gradients(trainer, data) for _ in range(5)]


def torch_alone(rank: int) -> list[dict[str, list[float]]]:
    module, data = network(), batches(rank)
    wrapper = DistributedDataParallel(module)
    state = PowerSGDState(None, 2, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8, random_seed=11)
    wrapper.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(5):
        inputs, targets = next(data)
        F.cross_entropy(wrapper(inputs), targets).backward()
        found.append({name: value.grad.flatten().tolist() for name, value in module.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_gradients_are_those_of_torchs_own_hook_bit_for_bit(ranks) -> None:
    # The model is one bucket: with several, torch's hook leaves to chance which all-reduce comes first.
    assert ranks(2, ours) == ranks(2, torch_alone)


def residuals_of(trainer: Trainer) -> dict[str, Tensor]:
    exchange = trainer.model.gradient_exchange
    return {name: value.clone() for name, value in exchange.residual()}


def units(rank: int) -> tuple[bool, bool]:
    """On a rank: whether a sent bias keeps (g_r - mean) / p, and the residual is empty while dense."""
    trainer, data, size = trainer_of(), batches(rank), dist.get_world_size()
    for _ in range(2):
        trainer.step(data)
    dense = residuals_of(trainer)
    inputs, targets = next(data)
    own = torch.autograd.grad(
        F.cross_entropy(trainer.model.bare(inputs), targets), trainer.model.bare[4].bias
    )
    trainer.compute_gradients(iter([(inputs, targets)]))
    mean = dict(trainer.model.named_gradients())["4.bias"]
    return torch.equal(residuals_of(trainer)["4.bias"], (own[0] - mean) / size), dense == {}


def test_the_residual_is_in_units_of_shares(ranks) -> None:
    assert ranks(2, units) == [(True, True)] * 2


def redo(rank: int, strategy: str) -> tuple[bool, bool]:
    """On a rank: whether steps that are taken again after a snapshot are the same, and residuals too."""
    trainer, data = trainer_of(strategy), batches(rank)
    for _ in range(4):
        trainer.step(data)
    snapshot, drawn = Snapshot(trainer), [next(data) for _ in range(3)]
    first = [gradients(trainer, iter([batch])) for batch in drawn]
    errors = residuals_of(trainer)
    snapshot.restore()
    second = [gradients(trainer, iter([batch])) for batch in drawn]
    return first == second, all(
        torch.equal(errors[name], value) for name, value in residuals_of(trainer).items()
    )


@pytest.mark.parametrize("strategy", ["ddp", "ddp:bucket_mb=0.001"])
def test_a_snapshot_brings_back_errors_factors_and_the_count_of_steps(ranks, strategy) -> None:
    assert ranks(2, redo, strategy) == [(True, True)] * 2


def resume(rank: int) -> dict[str, Any]:
    """On a rank: errors go to a new wrapper, whose buckets are others at first; two steps there."""
    trainer, data = trainer_of("ddp:bucket_mb=0.001"), batches(rank)
    for _ in range(4):
        trainer.step(data)
    fresh = trainer_of("ddp:bucket_mb=0.001")
    fresh.model.load_strategy_state(trainer.model.strategy_state())
    before = residuals_of(trainer)
    found: dict[str, Any] = {
        "moved": all(torch.equal(before[name], part) for name, part in residuals_of(fresh).items())
    }
    found["all"] = residuals_of(fresh).keys() == before.keys()
    for step in range(2):
        carried, (inputs, targets) = residuals_of(fresh), next(data)
        own = torch.autograd.grad(
            F.cross_entropy(fresh.model.bare(inputs), targets), list(fresh.model.bare.parameters())
        )
        fresh.compute_gradients(iter([(inputs, targets)]))
        applied, residual = dict(fresh.model.named_gradients()), residuals_of(fresh)
        names = [name for name, _ in fresh.model.bare.named_parameters()]
        errors = []
        for name, gradient in zip(names, own, strict=True):
            parts = torch.stack([gradient / 2, carried[name], -residual[name]]).double()
            size = parts.abs().sum()
            total = parts.sum(0)
            dist.all_reduce(total)
            errors.append(((total - applied[name]).norm() / size).item())
        found[f"step {step}"] = max(errors) < 256 * 2**-24
        found[f"compressed {step}"] = all(bool((residual[name] != carried[name]).any()) for name in names)
        fresh.update()
    return found


def test_errors_outlive_a_new_distribution_over_buckets(ranks) -> None:
    for found in ranks(2, resume):
        assert all(found.values()), found


def of_zeros(rank: int) -> bool:
    trainer = trainer_of()
    trainer.loss = lambda outputs, targets: 0 * outputs.sum()
    found = [gradients(trainer, batches(rank)) for _ in range(4)]
    return all(value == 0 for step in found for values in step.values() for value in values)


def test_gradients_of_zeros_stay_zeros(ranks) -> None:
    assert ranks(2, of_zeros) == [True] * 2
