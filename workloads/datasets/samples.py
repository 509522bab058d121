"""Real data that ship with bench or Python, or a user's text, in the shape that a workload takes.

A data set here is indexed by the list of all samples of a batch (`__getitems__`, which torch's DataLoader
calls if it exists), so that a batch is one gather instead of one Python call for each sample.
"""

from __future__ import annotations

import gzip
import math
import sysconfig
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from results.errors import UsageError
from workloads.datasets.facts import BYTE_VALUES, DIGITS_CLASSES, Digits, is_square
from workloads.workload import ImageInput, Pair, TokenInput

STDLIB_BYTES = 4 * 2**20
"""Length of the standard library's text that is used: the first 4 MiB."""
HELD_OUT_TEXT = 512
"""Number of held-out windows of a text, evenly over it and at most a tenth of them."""
_NOT_STDLIB = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}


class Images(Dataset[Pair]):
    """Images of one channel with their classes, for a model that takes `shape`."""

    def __init__(self, images: Tensor, classes: Tensor, *, shape: tuple[int, ...]) -> None:
        self.images = images
        self.classes = classes
        self.shape = shape

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> Pair:
        images = self.images[indices]
        if len(self.shape) == 3:
            images = images.expand(-1, *self.shape)
        return images.reshape(-1, *self.shape).contiguous(), self.classes[indices]

    def split(self) -> tuple[list[int], list[int]]:
        """Return the indices to train on and the held-out ones: the same in every training run, for any
        seed. The held-out ones are the last of a permutation with seed 0."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0)).tolist()
        return order[: -Digits.held_out], order[-Digits.held_out :]


class Windows(Dataset[Pair]):
    """Consecutive pieces of a text: `length` bytes, and for each of them the next byte."""

    def __init__(self, text: Tensor, *, length: int) -> None:
        self.text = text
        self.length = length
        self.reach = torch.arange(length + 1)

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.length)

    def __getitems__(self, indices: list[int]) -> Pair:
        starts = torch.tensor(indices, dtype=torch.int64) * self.length
        tokens = self.text[starts[:, None] + self.reach].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def split(self) -> tuple[list[int], list[int]]:
        """Return the indices to train on and the held-out ones: the same in every training run, for any
        seed."""
        kept = min(HELD_OUT_TEXT, len(self) // 10)
        every = len(self) / kept if kept else 0
        chosen = {int((place + 0.5) * every): None for place in range(kept)}
        return [index for index in range(len(self)) if index not in chosen], list(chosen)


def read_digits() -> tuple[Tensor, Tensor]:
    """Read the handwritten digits of the UCI repository: pixels from 0 to 16, (1797, 8, 8), and classes,
    (1797,)."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as text:
        rows = torch.from_numpy(np.loadtxt(text, delimiter=","))
    return rows[:, :-1].float().view(-1, 8, 8), rows[:, -1].long()


def digits(takes: ImageInput) -> Images:
    """Return the handwritten digits, standardised and resized to the shape that the model takes.

    Raises UsageError if the model takes too few classes, or images that are not square.
    """
    pixels, classes = read_digits()
    if takes.classes < DIGITS_CLASSES:
        raise UsageError(f"dataset digits has 10 classes, the workload {takes.classes}; it needs 10 or more")
    images = pixels[:, None]
    images = (images - images.mean()) / images.std()
    if not is_square(takes.shape):
        raise UsageError(f"dataset digits has square images; the workload takes the shape {takes.shape}")
    px = math.isqrt(takes.shape[0]) if len(takes.shape) == 1 else takes.shape[-1]
    resized = F.interpolate(images, size=(px, px), mode="bilinear", align_corners=False, antialias=False)
    return Images(resized, classes, shape=takes.shape)


def text_windows(takes: TokenInput, *, path: Path | None) -> Windows:
    """Return the bytes of a user's file, or of Python's standard library (None), in windows of the model's
    length.

    Raises UsageError if the model's vocabulary cannot hold bytes or the file cannot be read.
    """
    if takes.vocabulary < BYTE_VALUES:
        raise UsageError(
            f"dataset text is made of bytes; a vocabulary of {takes.vocabulary} is less than 256"
        )
    content = stdlib_text() if path is None else _read(path)
    return Windows(torch.frombuffer(bytearray(content), dtype=torch.uint8), length=takes.length)


def stdlib_text() -> bytes:
    """Return the first 4 MiB of the standard library's source, in the order of paths, without tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    kept = (entry for entry in sorted(folder.iterdir()) if entry.name not in _NOT_STDLIB)
    content = bytearray()
    for path in chain.from_iterable(sorted(e.rglob("*.py")) if e.is_dir() else [e] for e in kept):
        if path.suffix == ".py" and not _NOT_STDLIB.intersection(path.relative_to(folder).parts):
            content += path.read_bytes()
            if len(content) >= STDLIB_BYTES:
                break
    return bytes(content[:STDLIB_BYTES])


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the text {path}: {error.strerror}; give a readable file") from error
    if not content:
        raise UsageError(f"the text {path} is empty; give one of some thousand bytes")
    return content
