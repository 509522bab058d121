"""The facts of each data set without reading it, and which data sets fit a model; torch-free."""

from __future__ import annotations

import math
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from results.cell import SYNTHETIC
from results.registry import CatalogFacts, Registry, load
from results.spec import Option

DIGITS_CLASSES = 10
BYTE_VALUES = 256
_WORKERS = MappingProxyType(
    {"workers": Option(kind="int", default=0, minimum=0, help="processes that prepare batches; 0: the rank")}
)


class DatasetFacts(CatalogFacts):
    """The facts of one data set with its options."""

    takes: ClassVar[Literal["images", "tokens", "own"] | None]
    """The kind of input of models that fit it; None: any, as each workload draws its samples."""
    samples: ClassVar[int | None] = None
    """The samples of an epoch; None: without end, or dependent on the file and the length of a sample."""
    held_out: ClassVar[int] = 0
    """The number of `samples` that a training does not take, because it validates on them."""

    @property
    def file(self) -> str | None:
        """The path of the user's file, as written; None for data that come with Python packages."""
        return None

    def read(self, takes: Any, folder: Path) -> Any:
        """Read the torch data set, shaped to the model's `ImageInput` or `TokenInput`.

        `file` is relative to `folder`. Raises UsageError if the data set does not suit the model, or the file
        cannot be read.
        """
        raise NotImplementedError


class Synthetic(DatasetFacts):
    """Random samples that a workload draws."""

    name = SYNTHETIC
    help = "random samples made beforehand on the device: no input pipeline"
    takes = None


class Digits(DatasetFacts):
    """Small square images."""

    name = "digits"
    samples = 1797
    held_out = 360
    help = f"{samples} handwritten digits of 8 x 8, resized to the workload's input"
    options = _WORKERS
    takes = "images"

    def read(self, takes: Any, folder: Path) -> Any:
        return load("workloads.datasets.samples:digits")(takes)


class Text(DatasetFacts):
    """The bytes of a text as tokens."""

    name = "text"
    help = "bytes of a text: Python's own standard library, or text:PATH for a file of yours"
    positional = Option(kind="str", default="stdlib", help="PATH of a text file")
    options = _WORKERS
    takes = "tokens"

    @property
    def file(self) -> str | None:
        path = str(self.spec.positional)
        return None if path == self.positional.default else path

    def read(self, takes: Any, folder: Path) -> Any:
        path = None if self.file is None else folder / self.file
        return load("workloads.datasets.samples:text_windows")(takes, path=path)


class Own(DatasetFacts):
    """Data of a user's workload."""

    name = "own"
    help = "the data of your own workload (data=): a Dataset, an iterable, or a function that opens a loader"
    options = _WORKERS
    takes = "own"


DATASETS = Registry[DatasetFacts]("dataset", [Synthetic, Digits, Text, Own])


def fit_images(*, shape: tuple[int, ...], classes: int) -> tuple[str, ...]:
    """Return the data sets for a classifier of images of (channels, px, px) or (pixels,), the default
    first."""
    return (SYNTHETIC, Digits.name) if classes >= DIGITS_CLASSES and is_square(shape) else (SYNTHETIC,)


def fit_tokens(*, vocabulary: int) -> tuple[str, ...]:
    """Return the data sets for a model over tokens, the default first."""
    return (SYNTHETIC, Text.name) if vocabulary >= BYTE_VALUES else (SYNTHETIC,)


def is_square(shape: tuple[int, ...]) -> bool:
    """Return whether images of this shape, (channels, px, px) or (pixels,), are squares."""
    if len(shape) == 1:
        return math.isqrt(shape[0]) ** 2 == shape[0]
    return len(shape) == 3 and shape[1] == shape[2]
