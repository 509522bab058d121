"""Gossip averaging: every rank trains alone, and averages its parameters with its neighbours' on a ring.

Lian et al. 2017, arXiv:1705.09056. The optimizer's state and buffers stay each rank's own.
"""

from __future__ import annotations

import torch
from gossip.facts import neighbours
from torch import Tensor, nn

from strategies.collectives.link import Link
from strategies.exchange.buckets import Bucket, buckets_of
from strategies.training.parallel import ParallelModel, Setting
from strategies.training.replicas import take_from_first


class GossipModel(ParallelModel):
    """A replica that starts as rank 0's does, and is averaged after each update."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the parameters and buffers of rank 0."""
        super().__init__(module)
        self._link = Link(setting.exchange.group)
        self._averaged = neighbours(self._link.rank, self._link.size)
        for tensor in (*module.parameters(), *module.buffers()):
            take_from_first(self._link, [tensor])

    @torch.no_grad()
    def updated(self) -> None:
        trained = {
            name: value.detach() for name, value in self.bare.named_parameters() if value.requires_grad
        }
        for bucket in buckets_of(trained):
            for piece in bucket.pieces:
                piece.of(bucket.values).copy_(trained[piece.name])
            mean = self._mean(bucket)
            for piece in bucket.pieces:
                trained[piece.name].copy_(piece.of(mean))

    def _mean(self, bucket: Bucket) -> Tensor:
        """The mean of a bucket over the neighbours."""
        # What does not come, as the exchange is switched off, is what this rank has.
        every = {rank: bucket.values.clone() for rank in self._averaged}
        others = [rank for rank in self._averaged if rank != self._link.rank]
        under_way = [self._link.send(bucket.values, rank) for rank in others]
        under_way += [self._link.receive(every[rank], rank) for rank in others]
        for work in under_way:
            work.wait()
        return torch.stack([every[rank] for rank in self._averaged]).mean(dim=0)
