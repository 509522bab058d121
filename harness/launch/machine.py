"""The devices of this machine, and the number of workers that it can hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from harness.machine.device import usable_cores, visible_gpus
from harness.plan.surroundings import Devices, Limit
from results.cell import Device
from results.plan import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices of this machine that this process may use."""

    cores: int
    gpu_names: tuple[str, ...]

    @classmethod
    def here(cls) -> Machine:
        return cls(cores=len(usable_cores()), gpu_names=tuple(gpu.name for gpu in visible_gpus()))

    def devices(self, device: Device) -> int:
        return self.cores if device == "cpu" else len(self.gpu_names)

    def limit(self, request: Request, offers: Iterator[str | None]) -> Limit:
        """The most that this machine can hold without `--oversubscribe`.

        The first of the `offers` of launchers says how to run more; they are asked only if a size is more.
        """
        shared, word = "--oversubscribe --backend gloo", "CUDA devices"
        if request.device == "cpu":
            shared, word = "--oversubscribe", "cores"
        devices, hint = self.devices(request.device), f"{shared} runs it emulated"
        if max((*request.gpus, *(one.gpus or 0 for one in request.include))) > devices:
            hint = ", ".join([hint, *islice(filter(None, offers), 1)])
        return Limit(devices=devices, word=word, hint=hint)

    @property
    def hardware(self) -> Devices:
        """The hardware from which step times are assumed."""
        return Devices(cores=self.cores, gpu_name=self.gpu_names[0] if self.gpu_names else None)

    def threads(self, device: Device) -> int:
        """Threads of one rank: one core on CPU; with a GPU its share of the machine's cores.

        The same for every size, so that a rank of two and a rank of eight do the same work.
        """
        return 1 if device == "cpu" else max(1, self.cores // max(1, len(self.gpu_names)))
