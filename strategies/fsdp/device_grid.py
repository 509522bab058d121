"""The ranks of a sharding strategy: links in each dimension, and torch's mesh of those that share shards."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from results.groups import Dimension, GroupLayout
from strategies.collectives.link import Link


class DeviceGrid:
    """This rank's connections in each dimension of a group layout."""

    def __init__(self, everyone: Link, groups: GroupLayout, device: torch.device) -> None:
        """Collective over `everyone`, who must be all ranks of the default group."""
        self.everyone = everyone
        self.groups = groups
        self.shard = self._along("shard")
        self.replicate = self._along("replicate") if groups.replicate > 1 else None
        self.tensor = self._along("tensor") if groups.tensor > 1 else None
        self.mesh = self._mesh(device.type)

    def _along(self, dimension: Dimension) -> Link:
        parts = self.groups.groups(dimension)
        return self.everyone if len(parts) == 1 else self.everyone.split(parts)

    def _mesh(self, device_type: str) -> DeviceMesh:
        """The ranks that have shards of the same tensors: (shard,), or (replicate, shard)."""
        if self.replicate is None:
            return DeviceMesh.from_group(self.shard.group, device_type)
        alike = self.groups.groups("replicate", "shard")
        own = next(ranks for ranks in alike if self.everyone.rank in ranks)
        return DeviceMesh.from_group(
            [self.replicate.group, self.shard.group],
            device_type,
            mesh=torch.tensor(own).view(self.groups.replicate, self.groups.shard),
            mesh_dim_names=("replicate", "shard"),
        )
