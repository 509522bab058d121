"""`torch-powersgd` without torch."""

from __future__ import annotations

from strategies.compression.powersgd.facts import LowRankFacts, PowerSGDFacts


class TorchPowerSGDFacts(LowRankFacts):
    """A hook, what ours is measured against."""

    name = "torch-powersgd"
    help = "torch's PowerSGD hook, for ddp alone"
    instead = PowerSGDFacts.name
    ddp_hook = "strategies.ddp.torch_powersgd:TorchPowerSgd"
