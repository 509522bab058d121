"""`torch-powersgd` without torch."""

from __future__ import annotations

from strategies.compression.powersgd.facts import LowRankFacts


class TorchPowerSGDFacts(LowRankFacts):
    """A hook, what ours is measured against."""

    name = "torch-powersgd"
    help = "torch's PowerSGD hook, for ddp alone"
    ddp_hook = "strategies.compression.torch_powersgd.hook:TorchPowerSgd"
