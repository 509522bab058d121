"""The description of a checkpoint, its last file to be written: a checkpoint that has it is complete."""

from __future__ import annotations

import msgspec


class FileSum(msgspec.Struct, frozen=True, kw_only=True):
    """Size and hash of a file of a checkpoint."""

    bytes: int
    sha256: str


class LaidOut(msgspec.Struct, frozen=True, kw_only=True):
    """How a model was distributed: state of single ranks is only loaded where all of this is equal."""

    strategy: str
    """The canonical spec of the strategy; the next two fields are canonical specs, too."""
    compression: str
    collective: str
    ranks: int
    node_size: int | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a training run after one of its steps."""

    step: int
    """Updates so far."""
    session: str
    """A random text of the trainer that wrote it, new for each start."""
    laid_out: LaidOut
    optimizer: str
    """The name of its class."""
    own_replicas: bool
    """Whether it has the parameters of each rank, because replicas differ between two averages."""
    conditions: dict[str, str]
    """Version of torch, kind of CPU, threads, settings of the step, ...: if one differs, resumed training may
    differ in bits. Where ranks differ, the string has the values of all."""
    files: dict[str, FileSum]
    """Sizes and hashes of the files, by name."""
    metric: float | None = None
    """The metric by which the best checkpoint is chosen: less is better."""
    metric_name: str | None = None
    """The metric's name: only values of the same name are compared."""
