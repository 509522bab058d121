"""The replicas that average with this rank's own, by the promise of its strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from harness.worker.proof.reference import Reference
from harness.worker.rank.control import Control
from results.errors import UsageError
from results.groups import GroupLayout
from strategies.promise import Promise, everyone


class Partners:
    """Sums over the partners, and checks that replicas which must be equal are equal."""

    def __init__(
        self, promise: Promise, groups: GroupLayout, rank: int, *, device: torch.device, control: Control
    ) -> None:
        """`groups` are of all ranks; sums travel on `device`. Raises UsageError for a promise that names no
        replicas, or no replica but the own one."""
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
        """Replicas that this rank's averages with, itself among them."""
        return len(self._replicas)

    def sum(self, values: Tensor) -> Tensor:
        """The values of all partners added up in rank order, on the device; collective over all ranks, whose
        values have the same shape."""
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
        """The mean of the gradients that partners recomputed each for itself; collective.

        `parameters` are all of the model's: of some a partner may have no gradient, which counts as zero.
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
        """Whether ranks that the strategy promises to keep equal have the same `value`, which is at least 0.

        Collective; the same answer on all ranks.
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
