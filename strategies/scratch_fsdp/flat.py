"""Many parameters in one flat vector, of which every rank owns a shard.

They remain the parameters of the module, and leaves of autograd: their data are views of the complete vector.
Its memory is freed by shrinking its storage to 0 bytes, and allocated again before a gathering; a tensor that
autograd has saved is a view of the same storage, so that the backward pass finds the values again. While the
memory is freed, a parameter of the module has its shape, and NaN as its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import Work

from results.parts import ALIGNED_BYTES
from strategies.collectives.link import Link
from strategies.devices import device_of
from strategies.exchange.buckets import BucketRange, pieces_of
from strategies.exchange.lane import Pending
from strategies.scratch_fsdp.host_shards import HostShards
from strategies.training.boxes import Box, Owned, View, run_of
from strategies.training.replicas import take_from_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The settings of all flat vectors of a model."""

    link: Link
    device: torch.device
    """The device of the gathered vectors."""
    computed_in: torch.dtype | None
    """The data type in which single-precision parameters are gathered; None: their own."""
    host: HostShards | None
    """Keeps shards, gradients and the optimizer's state in host memory; None: the device has them."""
    fill: Callable[[Tensor], None]
    """Gives a parameter its initial values, if it was built without values."""

    def at_rest(self, values: Tensor) -> Tensor:
        """Return `values` where shards are kept; a copy in host memory may be read after `settle`."""
        return values if self.host is None else self.host.take(values)

    def settle(self) -> None:
        """Wait for all copies to host memory and from it."""
        if self.host is not None:
            self.host.settle()


class FlatParameters:
    """Parameters of one data type, all trained or all frozen, padded with zeros between them and to equal
    shards."""

    def __init__(self, named: Mapping[str, nn.Parameter], sharding: Sharding) -> None:
        """Take the parameters' initial values from rank 0, and free their memory; collective."""
        self.parameters = tuple(named.values())
        self._sharding = sharding
        link, kept_in = sharding.link, self.parameters[0].dtype
        dtype = sharding.computed_in if kept_in == torch.float32 else None
        dtype = dtype or kept_in
        shapes = ((name, parameter.shape) for name, parameter in named.items())
        self.pieces = pieces_of(shapes, ALIGNED_BYTES // dtype.itemsize)
        last = self.pieces[-1]
        shard = math.ceil((last.offset + last.numel) / link.size)
        # The value of a parameter while it is not gathered: reading it must not end the process. It has the
        # data type of the values, which autograd remembers for a leaf.
        number = math.nan if dtype.is_floating_point or dtype.is_complex else 0
        nothing = torch.full((), number, dtype=dtype, device=sharding.device)
        self._nothing = [nothing.expand(piece.shape) for piece in self.pieces]
        own = self._taken(link.size * shard, kept_in)[link.rank * shard :][:shard].clone()
        self.shard = nn.Parameter(sharding.at_rest(own), requires_grad=self.parameters[0].requires_grad)
        """The part that this rank updates: (n / ranks, rounded up), of n elements with the zeros between
        them."""
        self._whole = torch.empty(link.size * shard, dtype=dtype, device=sharding.device)
        self._views = [piece.of(self._whole) for piece in self.pieces]
        self._gaps = _gaps(self.pieces, len(self._whole))
        self._bytes = self._whole.nbytes
        self.give_up()
        # A tensor, as torch would convert a number to a tensor for every gradient.
        self._share = torch.tensor(1 / link.size, dtype=torch.float64)
        self._summed_in = torch.promote_types(kept_in, torch.float32)

    @torch.no_grad()
    def _taken(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Copy the parameters into one vector of zeros; the memory of each is freed as soon as it is
        copied."""
        values = torch.zeros(numel, dtype=dtype, device=self._sharding.device)
        for parameter, piece, nothing in zip(self.parameters, self.pieces, self._nothing, strict=True):
            self._sharding.fill(parameter)
            take_from_first(self._sharding.link, [parameter])
            piece.of(values).copy_(parameter)
            parameter.data = nothing
        return values

    @property
    def trained(self) -> bool:
        return self.shard.requires_grad

    def start_gather(self) -> Pending:
        """Begin to gather the complete vector from the shards; this and the `wait` of its work are
        collective."""
        storage = self._whole.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._bytes)
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view
        shard, link, host = self.shard.detach(), self._sharding.link, self._sharding.host
        if host is None:
            return link.start_all_gather(self._whole, shard.to(self._whole))
        return host.hand_over(shard, self._whole, partial(link.start_all_gather, self._whole))

    def give_up(self) -> None:
        """Free the memory of the complete vector; until it is gathered again the parameters are NaN."""
        for parameter, nothing in zip(self.parameters, self._nothing, strict=True):
            parameter.data = nothing
        self._whole.untyped_storage().resize_(0)

    def without_gradient(self) -> list[str]:
        """The names of the parameters without a gradient."""
        places = zip(self.pieces, self.parameters, strict=True)
        return [piece.name for piece, parameter in places if parameter.grad is None]

    @torch.no_grad()
    def start_average(self) -> Scattering:
        """Begin to average the gradients of the parameters, and free them; a missing gradient is zero.

        The average is at least in single precision, whatever the type of the gradients. Collective.
        """
        values = torch.empty(self._whole.numel(), dtype=self._summed_in, device=self._sharding.device)
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                piece.of(values).zero_()
            else:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                torch.mul(dense.to(self._summed_in), self._share, out=piece.of(values))
        for gap in self._gaps:
            values[gap].zero_()
        self._sharding.link.announce_bucket()
        return start_reduce_scatter(self._sharding.link, values)

    @torch.no_grad()
    def add_gradient(self, summed: Tensor) -> None:
        """Add to the gradient of the shard, which may be read after `Sharding.settle`."""
        own = self._sharding.at_rest(summed.to(self.shard.dtype))
        if self.shard.grad is None:
            self.shard.grad = own
        else:
            self._sharding.settle()
            self.shard.grad.add_(own)

    def forget_gradients(self) -> None:
        """Free all gradients of the parameters and of the shard."""
        for parameter in (*self.parameters, self.shard):
            parameter.grad = None

    def gathered(self, value: object) -> object:
        """Gather a value with the layout of the shard; return any other value as it is. Collective."""
        if not isinstance(value, Tensor) or value.shape != self.shard.shape:
            return value
        return self._sharding.link.all_gather(value.detach().to(self._sharding.device)).view(-1)

    def owned(self) -> Owned:
        """Return the shard with its part of each parameter: a range of elements, as rectangles."""
        length, start = self.shard.numel(), self._sharding.link.rank * self.shard.numel()
        boxes: list[tuple[Box, View]] = []
        for piece in self.pieces:
            first = max(start, piece.offset)
            stop = min(start + length, piece.offset + piece.numel)
            elements = range(first - piece.offset, stop - piece.offset)
            boxes += run_of(piece.name, tuple(piece.shape), elements, first - start)
        return Owned(self.shard, tuple(boxes))

    def part(self, value: object, piece: BucketRange) -> object:
        """Return one parameter's part of a result of `gathered`."""
        if not isinstance(value, Tensor) or value.shape != self._whole.shape:
            return value
        return piece.of(value)


def _gaps(pieces: Sequence[BucketRange], numel: int) -> list[slice]:
    """Return the slices of a vector of `numel` elements that belong to no piece."""
    ends = [piece.offset + piece.numel for piece in pieces]
    starts = [*(piece.offset for piece in pieces[1:]), numel]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def start_reduce_scatter(link: Link, values: Tensor) -> Scattering:
    """Begin to sum `values`, (size * n,), over the ranks; part r of the sum is for rank r.

    Gloo, the backend of CPU ranks, runs its reduce-scatter as an all-reduce, which moves twice the bytes.
    Instead every rank receives the parts of all others as they are, and sums them in `wait`.
    """
    on_host = device_of(values.device).kind == "cpu"
    return _Exchanged(link, values) if on_host else _Reduced(link, values)


class _Reduced:
    """A reduce-scatter by the backend."""

    def __init__(self, link: Link, values: Tensor) -> None:
        self._values = values
        self._summed = values.new_empty(values.numel() // link.size)
        self._work: Work = link.start_reduce_scatter(self._summed, values)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._summed


class _Exchanged:
    """A reduce-scatter by an all-to-all, and a sum in the order of ranks."""

    def __init__(self, link: Link, values: Tensor) -> None:
        self._values = values
        self._received = torch.empty_like(values)
        self._size = link.size
        self._work: Work = link.start_all_to_all(self._received, values)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._received.view(self._size, -1).sum(0)


Scattering = _Reduced | _Exchanged
"""A reduce-scatter under way. Its `wait` returns this rank's part, (n,), of the sum over the ranks (on CUDA
the current stream waits for it); until then its input must not change."""
