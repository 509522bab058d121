"""Checkpoints of torch.distributed.checkpoint whose tensors are boxes of complete parameters, by bare names.

torch's planners support only boxes of DTensors, not flat shards and layers split over ranks. No file is
unpickled without restriction: torch reads tensors and blobs with `weights_only`, and its index of the files
may contain only the classes below.

`Reading` reads a rank's state from a checkpoint. The rank may own the same rectangular parts of the tensors
(`Box`) as when the state was saved, or other parts.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from results.errors import SchemaError, UsageError
from strategies.saving.run_folder import Kept
from strategies.saving.state import Plain, RankState, Resumable, unpickled
from strategies.training.boxes import Box

Boxes = Mapping[Box, Tensor]
"""The parts of one tensor of a checkpoint that a rank has, or wants, in host memory."""


class BoxSavePlanner(DefaultSavePlanner):
    """Save planner: writes boxes of tensors, and byte blobs; one of the ranks that have a box writes it."""

    def __init__(self, tensors: Mapping[str, Boxes], blobs: Mapping[str, bytes]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blobs = blobs
        self._places = {
            (key, box.offsets): value for key, boxes in tensors.items() for box, value in boxes.items()
        }
        self._items = [
            WriteItem(
                index=MetadataIndex(key, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box),
                    properties=TensorProperties(dtype=value.dtype),
                    size=torch.Size(box.shape),
                ),
            )
            for key, boxes in tensors.items()
            for box, value in boxes.items()
        ]

    def create_local_plan(self) -> SavePlan:
        blobs = [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in self._blobs]
        self.plan = SavePlan([*self._items, *blobs])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._blobs[index.fqn])
        return self._places[index.fqn, tuple(index.offset or ())]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


class BoxLoadPlanner(DefaultLoadPlanner):
    """Load planner: reads boxes of tensors, however they were divided when written, and byte blobs."""

    def __init__(self, tensors: Mapping[str, Boxes], blobs: list[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._names = tensors, blobs
        self._places = {
            (key, box.offsets): value for key, boxes in tensors.items() for box, value in boxes.items()
        }
        self.blobs: dict[str, bytes] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, boxes in self._tensors.items():
            kept = self.metadata.state_dict_metadata[key]
            assert isinstance(kept, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, kept, [_chunk(box) for box in boxes])
        start = torch.Size((0,))
        for name in self._names:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, start, index, start, start))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.blobs[read_item.dest_index.fqn] = value.getvalue()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._places[index.fqn, tuple(index.offset or ())]


class CarefulReader(FileSystemReader):
    """torch's reader of files, which would unpickle the index of the files without restriction."""

    def read_metadata(self, *arguments: Any, **named: Any) -> Metadata:
        """Read the index. Raises SchemaError if it is damaged, or contains classes that no index has."""
        path = Path(self._get_metadata_path())
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except SchemaError as error:
            raise SchemaError(f"{path} {error}") from error
        except Exception as error:  # a damaged pickle may raise any exception
            raise SchemaError(f"{path} is damaged: {error}; resume from another checkpoint") from error
        if not isinstance(metadata, Metadata):
            raise SchemaError(f"{path} is not a list of a checkpoint's tensors")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata


_HOME = "torch.distributed.checkpoint."
_CLASSES = {
    *((_HOME + "metadata", name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_HOME + "metadata", name) for name in ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex")),
    *((_HOME + "metadata", name) for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(((_HOME + "filesystem"), "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise SchemaError(
            f"names {module}.{name}, which no checkpoint contains: it has another origin, and no code in it "
            f"was run"
        )


class Reading:
    """One checkpoint, as a rank of a trainer reads it."""

    def __init__(self, trainer: Resumable, kept: Kept, rank: int, *, exact: bool) -> None:
        self._kept, self._rank, self._exact = kept, rank, exact
        self._reader = CarefulReader(kept.path)
        self._metadata = self._reader.read_metadata()
        for info in (self._metadata.storage_data or {}).values():
            if Path(info.relative_path).name not in kept.manifest.files or "/" in str(info.relative_path):
                raise SchemaError(f"{kept.path} names {info.relative_path}, which is not one of its files")
        self._boxes = [box for owned in trainer.model.owned() for box, _ in owned.boxes]
        self._names = set(trainer.model.state_keys.values()) | {box.name for box in self._boxes}

    def state(self) -> RankState:
        """Return the state of `rank`; without `own` if it is not the same rank of the same layout.

        Raises UsageError for a checkpoint of another model, SchemaError for a file of another program.
        """
        replicas = self._replicas()
        for prefix in replicas:
            self._require_model(f"{prefix}parameters/")
        parameters = self._mean(replicas, "parameters/")
        optimizer = {kind: self._mean(replicas, f"optimizer/{kind}/") for kind in self._kinds(replicas)}
        own = f"own/{self._rank}"
        ranks = [self._rank] if self._exact else list(range(self._kept.manifest.laid_out.ranks))
        blobs = self._read({}, [*(f"shared/{rank}" for rank in ranks), *([own] if self._exact else [])])
        shared = [self._plain(blobs[f"shared/{rank}"]) for rank in ranks]
        return RankState(
            parameters=parameters,
            optimizer=optimizer,
            shared=shared[0] if self._exact else _merged(shared, averaged=len(replicas) > 1),
            own=self._plain(blobs[own]) if self._exact else {},
        )

    def _replicas(self) -> list[str]:
        """Return the prefixes of the parameters that this rank resumes from: all replicas, if it resumes from
        their mean."""
        if not self._kept.manifest.own_replicas:
            return [""]
        ranks = [self._rank] if self._exact else range(self._kept.manifest.laid_out.ranks)
        return [f"replicas/{rank}/" for rank in ranks]

    def _kinds(self, replicas: list[str]) -> list[str]:
        """Return the names of the values that the optimizer keeps for parameters of these replicas."""
        starts = [f"{replica}optimizer/" for replica in replicas]
        keys = [(key, start) for key in self._metadata.state_dict_metadata for start in starts]
        return sorted({key.removeprefix(s).partition("/")[0] for key, s in keys if key.startswith(s)})

    def _require_model(self, prefix: str) -> None:
        known = self._metadata.state_dict_metadata
        for box in self._boxes:
            found = known.get(prefix + box.name)
            shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
            if shape != box.shape:
                has = "does not have it" if shape is None else f"has it with the shape {list(shape)}"
                raise UsageError(
                    f"{self._kept.path} belongs to another model: this one has {box.name} {list(box.shape)}, "
                    f"and the checkpoint {has}; build the model that was saved"
                )
        for key in known:
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in self._names:
                raise UsageError(
                    f"{self._kept.path} belongs to another model: it has {name}, which this one lacks; build "
                    f"the model that was saved"
                )

    def _mean(self, replicas: list[str], what: str) -> dict[Box, Tensor]:
        """Return the mean of this rank's boxes over the replicas that have them (a parameter may have had no
        gradient on some), with one replica in memory at a time. The mean of equal numbers is the number."""
        if len(replicas) == 1:
            return self._boxes_of(replicas[0] + what)
        known = self._metadata.state_dict_metadata
        first: dict[Box, Tensor] = {}
        total: dict[Box, Tensor] = {}
        for prefix in replicas:
            for box, value in self._boxes_of(prefix + what).items():
                if box not in first:
                    first[box], total[box] = value, torch.zeros_like(value)
                elif value.is_floating_point():
                    having = sum(replica + what + box.name in known for replica in replicas)
                    total[box] += (value - first[box]) / having
        return {box: value + total[box] for box, value in first.items()}

    def _boxes_of(self, prefix: str) -> dict[Box, Tensor]:
        wanted: dict[str, dict[Box, Tensor]] = {}
        for box in self._boxes:
            kept = self._metadata.state_dict_metadata.get(prefix + box.name)
            if isinstance(kept, TensorStorageMetadata):
                tensor = torch.empty(box.sizes, dtype=kept.properties.dtype)
                wanted.setdefault(prefix + box.name, {})[box] = tensor
        self._read(wanted, [])
        return {box: value for boxes in wanted.values() for box, value in boxes.items()}

    def _read(self, tensors: dict[str, dict[Box, Tensor]], blobs: list[str]) -> dict[str, bytes]:
        planner = BoxLoadPlanner(tensors, blobs)
        planner.set_up_planner({}, self._metadata)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = planner.create_local_plan()
        try:
            self._reader.read_data(plan, planner).wait()
        except OSError:
            raise
        except Exception as error:  # pickle may raise any exception
            raise self._foreign(error) from error
        return planner.blobs

    def _plain(self, data: bytes) -> Plain:
        try:
            plain: Plain = unpickled(data)
        except Exception as error:  # pickle may raise any exception
            raise self._foreign(error) from error
        return plain

    def _foreign(self, error: Exception) -> SchemaError:
        reason = str(error).partition(chr(10))[0]
        if not isinstance(error, pickle.UnpicklingError):
            return SchemaError(
                f"{self._kept.path} cannot be read: it is torn, or of another torch "
                f"({type(error).__name__}: {reason})"
            )
        return SchemaError(
            f"{self._kept.path} contains more than numbers, strings and tensors, which loading refuses: it "
            f"has another origin, and no code in it was run ({reason})"
        )


def _merged(shared: list[Plain], *, averaged: bool) -> Plain:
    """Merge the shared state of all ranks: by name the value of the first rank that has it, and the mean of
    buffers that differ by replica."""
    merged: Plain = dict(shared[0])
    for part in ("counts", "buffers"):
        merged[part] = {name: value for each in reversed(shared) for name, value in each[part].items()}
    if averaged:
        merged["buffers"] = {
            name: _mean_of([each["buffers"][name] for each in shared]) for name in merged["buffers"]
        }
    return merged


def _mean_of(values: list[Any]) -> Tensor:
    first: Tensor = values[0]
    if not first.is_floating_point() or not bool(first.isfinite().all()):
        return first
    differences = [(value - first) / len(values) for value in values[1:]]
    return first + torch.stack(differences).sum(dim=0) if differences else first
