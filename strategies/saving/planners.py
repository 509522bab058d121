"""Checkpoints of torch.distributed.checkpoint whose tensors are boxes of complete parameters, by bare names.

torch's planners support only boxes of DTensors, not flat shards and layers split over ranks. No file is
unpickled without restriction: torch reads tensors and blobs with `weights_only`, and its index of the files
may contain only the classes below.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
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
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from results.errors import SchemaError
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


class BoxLoadPlanner(LoadPlanner):
    """Load planner: reads boxes of tensors, however they were divided when written, and byte blobs."""

    def __init__(self, tensors: Mapping[str, Boxes], blobs: list[str]) -> None:
        self._tensors, self._names = tensors, blobs
        self._places = {
            (key, box.offsets): value for key, boxes in tensors.items() for box, value in boxes.items()
        }
        self.blobs: dict[str, bytes] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, boxes in self._tensors.items():
            kept = self._metadata.state_dict_metadata[key]
            assert isinstance(kept, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, kept, [_chunk(box) for box in boxes])
        start = torch.Size((0,))
        for name in self._names:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, start, index, start, start))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.blobs[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        tensor = self._places[index.fqn, tuple(index.offset or ())]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        return


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
