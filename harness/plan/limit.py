"""How many workers the machine at hand can hold, and what to do about cells that need more."""

from __future__ import annotations

from dataclasses import dataclass

from harness.plan.surroundings import Devices
from results.catalogue.gpus import memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limits on the cells of a plan. A cell that exceeds one is skipped with a reason, not refused."""

    devices: int | None = None
    """Cores of this machine on CPU, its CUDA devices otherwise; None if the number is not limited."""
    word: str = ""
    """What is counted: `cores` or `CUDA devices`."""
    hint: str = ""
    """What would make a larger cell run."""
    link: str | None = None
    """Why no link can be made here; None if one can be made."""
    gpus: Devices | None = None
    """The GPUs whose memory each cell must fit into; None if memory is not limited."""

    @property
    def gpu_bytes(self) -> int | None:
        """An upper bound of the memory of one GPU; None if it is not known or not limited."""
        if self.gpus is None:
            return None
        stated = memory_bytes(self.gpus.gpu_name or "")
        # The catalogue's GB can be GiB: an A100 of 80 GB has 85e9 bytes.
        return self.gpus.gpu_bytes or (stated and stated * 2**30 // 10**9)

    def reason(self, gpus: int) -> str | None:
        """Why a cell of `gpus` workers does not run here; None if it does."""
        if self.devices is None or gpus <= self.devices:
            return None
        word = self.word.removesuffix("s") if self.devices == 1 else self.word
        return f"needs {gpus}, this machine has {self.devices} {word}; {self.hint}"
