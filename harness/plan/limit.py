"""How many workers the machine at hand can hold, and what to do about cells that need more."""

from __future__ import annotations

from dataclasses import dataclass

from harness.plan.surroundings import Devices
from results.catalogue.gpus import memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the machines of a plan have; a cell beyond it is skipped with a reason, not refused."""

    devices: int | None = None
    """Cores of this machine on CPU, its CUDA devices otherwise; None: as many as are asked for."""
    word: str = ""
    """What is counted: `cores` or `CUDA devices`."""
    hint: str = ""
    """What would make a larger cell run."""
    gpus: Devices | None = None
    """The GPUs whose memory cells must fit into; None where they need not, or it is not known."""

    @property
    def gpu_bytes(self) -> int | None:
        """At most what one of `gpus` has."""
        if self.gpus is None or self.gpus.gpu_bytes is not None:
            return self.gpus and self.gpus.gpu_bytes
        stated = self.gpus.gpu_name and memory_bytes(self.gpus.gpu_name)
        # A GB of the catalogue may be a GiB: an A100 of 80 GB has 85e9 bytes.
        return stated * 2**30 // 10**9 if stated else None

    def reason(self, gpus: int) -> str | None:
        """Why a cell of `gpus` workers does not run here; None if it does."""
        if self.devices is None or gpus <= self.devices:
            return None
        word = self.word.removesuffix("s") if self.devices == 1 else self.word
        return f"needs {gpus}, this machine has {self.devices} {word}; {self.hint}"
