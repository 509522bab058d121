"""Whether there is memory for the simulation of a step, before anything of it is built."""

from __future__ import annotations

import math

from harness.worker.rank.control import Control
from harness.worker.rank.usage import available_bytes, host_number
from strategies.devices import device_of

GIB = 2**30
ON_DEVICE = 2
"""Of its parameters, on a device with memory of its own: what a simulation has there at least, which are
parameters and gradients."""


def no_room(control: Control, parameter_bytes: int, *, copies: int) -> str | None:
    """Why a host or a device has too little memory for simulations; None if all have enough. Collective, the
    same answer on all ranks.

    `copies` of its parameters are what this rank takes of its host's memory; 0: it simulates nothing. The
    kernel would end a rank that takes too much, and with it a run whose figures are not written yet.
    """
    figures = device_of(control.device).memory()
    free = math.inf if figures is None else figures.free + figures.reserved - figures.allocated
    rows = [row for row in control.of_all([host_number(), available_bytes(), copies, free]) if row[2]]
    for host in dict.fromkeys(row[0] for row in rows):
        here = [row for row in rows if row[0] == host]
        needed, left = parameter_bytes * sum(row[2] for row in here), min(row[1] for row in here)
        if needed > left:
            return (
                f"to recompute a step takes about {needed / GIB:.2g} GiB of host memory "
                f"(ranks on the host: {len(here)}), and {left / GIB:.2g} GiB are available"
            )
    on_device, least = ON_DEVICE * parameter_bytes, min(row[3] for row in rows)
    if on_device > least:
        return (
            f"to recompute a step takes at least {on_device / GIB:.2g} GiB of a device beside the cell's own "
            f"memory, and {least / GIB:.2g} GiB are free"
        )
    return None
