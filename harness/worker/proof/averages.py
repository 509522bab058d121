"""The law of conservation, checked for a lossy exchange: over all ranks, values are applied or in residuals.

For shares v_r of a gradient (or of a difference of parameters), the residual c_r that each rank adds to its
share, its residual u_r after the exchange, and the sum s that all applied: sum v_r + sum c_r = s + sum u_r.
It is exact but for rounding, whatever the compressor does, and the check reads only its residuals.

`Partners` are the replicas that average with this rank's own, by the promise of its strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from harness.worker.proof.comparison import (
    TOLERANCE,
    ProofFinding,
    Tensors,
    compare_gradients,
    compare_surroundings,
    distance,
    wide,
)
from harness.worker.proof.reference import UNIT_ROUNDOFF, Reference, exact_arithmetic, finite
from harness.worker.rank.control import Control
from results.cell import Cell
from results.errors import UsageError
from results.groups import GroupLayout
from strategies.catalog import COMPRESSIONS
from strategies.promise import OuterStep, Promise, everyone
from strategies.training.parallel import ParallelModel


def law_tolerance(cell: Cell) -> float:
    """Return the allowed difference between both sides of the law, relative to the size of the terms."""
    return COMPRESSIONS.facts(cell.compression).law_tolerance(cell.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Sum of the applied gradients and of the change of the residuals: it must equal what went in."""

    values: dict[str, Tensor]
    residuals: dict[str, Tensor]
    """Sum of the absolute values of the residuals, before and after the exchange."""


class Ledger:
    """Books of an exchange: opened before it and balanced after it, on all ranks; collective."""

    def __init__(self, model: ParallelModel, partners: Partners) -> None:
        """The shares of `partners` are summed."""
        self._model, self._partners = model, partners
        exchange = model.gradient_exchange
        self._before = {} if exchange is None else {name: v.clone() for name, v in exchange.carried()}

    def balance(self, applied: Iterable[tuple[str, Tensor]], *, scale: float) -> Balance:
        """Balance the sums that were `applied`, by parameter.

        `scale` is the loss scaler's factor, which residuals contain.
        """
        exchange = self._model.gradient_exchange
        after = {} if exchange is None else dict(exchange.residual())
        values, residuals = {}, {}
        for name, sums in applied:
            change = torch.zeros_like(sums, dtype=wide(sums))
            size = torch.zeros_like(sums, dtype=torch.float64)
            for part, sign in ((after.get(name), 1.0), (self._before.get(name), -1.0)):
                if part is not None:
                    change += sign * part / scale
                    size += part.abs() / scale
            change, size = self._partners.sum(change), self._partners.sum(size)
            # In host memory: a device that the cell nearly fills has no room for the books of all parameters.
            values[name], residuals[name] = (sums + change).cpu(), size.cpu()
        return Balance(values=values, residuals=residuals)


def compare_balance(cell: Cell, balance: Balance, reference: Reference) -> list[ProofFinding]:
    """Compare what the exchange accounts for with the simulated gradients, in L2 norm.

    Each parameter is compared by itself, or, where kernels need not be reproducible, all of them together.
    """
    # A name that is on one side only is found by `same_names`.
    names = sorted(set(reference.gradients) & set(balance.values))
    tolerance = law_tolerance(cell)
    if exact_arithmetic(cell):
        groups = [[name] for name in names]
    else:
        groups, tolerance = [names], tolerance + TOLERANCE[cell.precision]
    return [
        _balanced(
            f"gradient of {group[0]} with its residual",
            [(balance.values[name], reference.gradients[name]) for name in group],
            tolerance * distance([(reference.sizes[name] + balance.residuals[name], None) for name in group]),
        )
        for group in groups
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterTaken:
    """An outer step as the strategy took it, in host memory. A tensor without momentum has a momentum of
    0."""

    promised: OuterStep
    before: Tensors
    """The momentum before the step."""
    after: Tensors
    parameters: Tensors
    """The parameters after it."""

    def compare(
        self, name: str, base: Tensor, gradient: Tensor, size: Tensor, *, lossy: float, rounding: float
    ) -> list[ProofFinding]:
        """Compare the end of a parameter's step with torch's own from `base`, in double precision.

        The gradient is known within `lossy` in L2 norm, and within `rounding` times `size`. The step
        multiplies it by lr (1 + momentum).
        """
        none = torch.zeros_like(base)
        before, after = (momenta.get(name, none).to(base.dtype) for momenta in (self.before, self.after))
        parameter = nn.Parameter(base.clone())
        parameter.grad = gradient
        step = self.promised
        sgd = torch.optim.SGD([parameter], lr=step.lr, momentum=step.momentum, nesterov=True)
        sgd.state[parameter]["momentum_buffer"] = before.clone()
        sgd.step()
        factor, size = step.lr * (1 + step.momentum), size + before.abs()
        ends = (self.parameters[name] - base, parameter.detach() - base)
        bound = factor * lossy + rounding * distance([(base.abs() + factor * size, None)])
        momentum, of_momentum = sgd.state[parameter]["momentum_buffer"], lossy
        of_momentum += rounding * distance([(size, None)])
        return [
            _balanced(f"outer step of {name}", [ends], bound),
            _balanced(f"outer momentum of {name}", [(after, momentum)], of_momentum),
        ]


def compare_average(
    cell: Cell,
    balance: Balance,
    own: Tensors,
    common: Tensors | None,
    partners: Partners,
    outer: OuterTaken | None = None,
) -> list[ProofFinding]:
    """Compare an average of the partners' parameters with what each recomputed for itself; collective.

    If they had parameters in `common`, differences to these were exchanged, and so these are compared, up to
    the rounding of parameters. With an `outer` step the mean of the differences is its gradient, with the
    other sign. All are in host memory.
    """
    findings = []
    for name in sorted(own):
        mine = own[name].to(wide(own[name]))
        base = torch.zeros_like(mine) if common is None else common[name].to(mine.dtype)
        shares = (mine - base) / partners.count
        mean, size = partners.sum(shares).cpu(), partners.sum(shares.abs()).cpu()
        lossy = law_tolerance(cell) if cell.compresses else 0.0
        lossy *= distance([(size + balance.residuals[name], None)])
        rounding = 4 * (partners.count + 4) * UNIT_ROUNDOFF
        if outer is not None:
            into_residuals = balance.values[name] - outer.parameters[name]
            gradient = into_residuals - mean
            findings += outer.compare(name, base, gradient, size, lossy=lossy, rounding=rounding)
            continue
        bound = lossy + rounding * distance([(size + base.abs(), None)])
        applied = balance.values[name] - base
        findings.append(_balanced(f"gradient or average of {name}", [(applied, mean)], bound))
    return findings


def compare_step(
    cell: Cell, gradients: Tensors, buffers: Tensors, reference: Reference, balance: Balance | None
) -> list[ProofFinding]:
    """Compare one step with the reference: its gradients themselves, or the books of a lossy exchange."""
    findings = compare_surroundings(cell, gradients, buffers, reference)
    if balance is None:
        findings += compare_gradients(cell, gradients, reference)
    elif finite(gradients):
        findings.append(something_sent(gradients, reference.gradients))
        findings += compare_balance(cell, balance, reference)
    return findings


def something_sent(applied: Tensors, expected: Tensors) -> ProofFinding:
    """Require that something was applied: applying nothing keeps the law of conservation, and trains
    nothing."""
    sent = distance([(value, None) for value in applied.values()])
    size = distance([(value, None) for value in expected.values()])
    return ProofFinding(
        passed=sent > 0 or size == 0,
        of="exchange",
        what=f"gradient: nothing of {size:.3g} was applied",
        difference=0.0,
        bound=size,
    )


def _balanced(what: str, pairs: list[tuple[Tensor, Tensor | None]], bound: float) -> ProofFinding:
    difference = distance(pairs)
    words = f"{what} differs from the serial simulation by {difference:.3g}, more than {bound:.3g}"
    return ProofFinding.within("gradient", words, difference, bound)


class Partners:
    """The replicas that average with this rank's own: sums over them, and checks that they are equal."""

    def __init__(
        self, promise: Promise, groups: GroupLayout, rank: int, *, device: torch.device, control: Control
    ) -> None:
        """Find the partners among all ranks' `groups`; sums travel on `device`.

        Raises UsageError for a promise that names no replicas, or only this rank's own replica.
        """
        self._promise, self._groups, self._rank = promise, groups, rank
        self._device, self._control = device, control
        self._replicas = self._of(groups.replica(rank))
        if groups.replicas > 1 and all(len(self._of(replica)) == 1 for replica in range(groups.replicas)):
            raise UsageError(
                "the strategy promises that no replica averages with another one: name partners, or declare "
                "the promise to be `unproven`"
            )

    def _of(self, replica: int) -> list[int]:
        partners = sorted(self._promise.partners(replica, self._groups.replicas))
        known = set(range(self._groups.replicas))
        if len(set(partners)) < len(partners) or replica not in partners or not known.issuperset(partners):
            raise UsageError(
                f"the strategy promises that replica {replica} averages with {partners}: these must be "
                f"different replicas below {len(known)}, itself among them"
            )
        return partners

    @property
    def count(self) -> int:
        """Number of replicas in this rank's averages, its own included."""
        return len(self._replicas)

    def sum(self, values: Tensor) -> Tensor:
        """Add up the values of all partners in rank order, on the device.

        Collective over all ranks, whose values have the same shape.
        """
        values = values.to(self._device)
        if self._promise.partners is everyone and self._groups.model_parallel == 1:
            total = values.clone()
            self._control.all_reduce(total)
            return total
        every = self._control.all_gather(values.contiguous())
        first = {self._groups.replica(rank): rank for rank in reversed(range(self._groups.ranks))}
        own = [every[first[replica]] for replica in self._replicas]
        total = own[0].clone()
        for values in own[1:]:
            total += values
        return total

    def mean(self, reference: Reference, parameters: Mapping[str, Tensor]) -> Reference:
        """Return the mean of the gradients that each partner recomputed for itself; collective.

        `parameters` are all parameters of the model: if a partner has no gradient of one, it counts as zero.
        """
        gradients, sizes = {}, {}
        for name, parameter in parameters.items():
            own = reference.gradients.get(name)
            gradient = torch.zeros_like(parameter) if own is None else own
            size = reference.sizes.get(name, gradient.abs())
            mean, mean_size = self.sum(gradient / self.count), self.sum(size / self.count)
            if self.sum(torch.tensor([float(own is not None)])).item():
                gradients[name], sizes[name] = mean.cpu(), mean_size.cpu()
        return replace(reference, gradients=gradients, sizes=sizes)

    def agree(self, value: float) -> bool:
        """Return whether ranks that the strategy promises to keep equal have the same `value` of at least 0.

        Collective, with the same answer on all ranks.
        """
        if not self._promise.equal:
            return True
        if self._promise.partners is everyone:
            return self._control.agree(value)
        every = [0.0] * self._groups.ranks
        every[self._rank] = value
        every = self._control.largest(every)
        alike = (
            every[rank]
            for rank in range(self._groups.ranks)
            if self._of(self._groups.replica(rank)) == self._replicas
        )
        different = any(other != value for other in alike)
        return not self._control.largest([float(different)])[0]
