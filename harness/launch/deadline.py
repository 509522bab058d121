"""When a campaign has to end."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """A moment of a monotonic clock that may be brought forward, also from a signal handler."""

    def __init__(
        self, seconds: float | None, reason: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`seconds` from now; None: there is no end yet."""
        self._clock = clock
        self._at = None if seconds is None else clock() + seconds
        self.reason = reason

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, negative ones after the end; None: there is no end."""
        return None if self._at is None else self._at - self._clock()

    @property
    def is_over(self) -> bool:
        left = self.left_s
        return left is not None and left < 0

    def bring_forward(self, seconds: float, reason: str) -> None:
        """End `seconds` from now, unless the end is sooner already."""
        at = self._clock() + seconds
        if self._at is None or at < self._at:
            self._at, self.reason = at, reason
