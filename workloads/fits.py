"""Which data sets fit a model, and the sizes that decide it; torch-free."""

from __future__ import annotations

import math

DIGITS_IMAGES = 1797
DIGITS_CLASSES = 10
BYTE_VALUES = 256


def fit_images(*, shape: tuple[int, ...], classes: int) -> tuple[str, ...]:
    """Data sets for a classifier of images of (channels, px, px) or (pixels,), the default first."""
    return ("synthetic", "digits") if is_square(shape) and classes >= DIGITS_CLASSES else ("synthetic",)


def fit_tokens(*, vocabulary: int) -> tuple[str, ...]:
    """Data sets for a model over tokens, the default first."""
    return ("synthetic", "text") if vocabulary >= BYTE_VALUES else ("synthetic",)


def is_square(shape: tuple[int, ...]) -> bool:
    """Whether images of this shape, (channels, px, px) or (pixels,), are squares."""
    if len(shape) == 1:
        return math.isqrt(shape[0]) ** 2 == shape[0]
    return len(shape) == 3 and shape[1] == shape[2]
