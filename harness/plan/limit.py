"""How many workers the machine at hand can hold, and what to do about cells that need more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What this machine has; a cell beyond it is skipped with a reason, not refused."""

    devices: int
    """Cores on CPU, CUDA devices otherwise."""
    word: str
    """What is counted: `cores` or `CUDA devices`."""
    hint: str
    """What would make a larger cell run."""

    def reason(self, gpus: int) -> str | None:
        """Why a cell of `gpus` workers does not run here; None if it does."""
        if gpus <= self.devices:
            return None
        word = self.word.removesuffix("s") if self.devices == 1 else self.word
        return f"needs {gpus}, this machine has {self.devices} {word}; {self.hint}"
