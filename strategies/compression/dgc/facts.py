"""`dgc` without torch."""

from __future__ import annotations

from types import MappingProxyType

from results.cell import Cell
from results.spec import Option
from strategies.compression.facts import RATIO, SELECT, WARMUP, CompressorFacts
from strategies.compression.topk.facts import TopKFacts
from strategies.optimizers.catalog import OPTIMIZERS


class DgcFacts(CompressorFacts):
    """The momentum of gradients is kept and compressed on each rank."""

    name = "dgc"
    help = "deep gradient compression: top-k with momentum correction and masking"
    positional = RATIO
    options = MappingProxyType(
        {
            "momentum": Option(
                kind="float", default=0.9, minimum=0, maximum=1, help="momentum, kept before compression"
            ),
            "warmup": WARMUP,
            "select": SELECT,
        }
    )
    compressor = "strategies.compression.dgc.compressor:Dgc"
    need = "all-gather"
    instead = TopKFacts.name
    gradients_alone = "it corrects the momentum of gradients"
    own_gradients_alone = "it forgets the momentum of what a rank has sent of its own gradients"

    def refusal(self, cell: Cell) -> str | None:
        if OPTIMIZERS.facts(cell.optimizer).state_values:
            return (
                f"dgc goes with --optimizer sgd:momentum=0 alone, not {cell.optimizer}: it applies momentum "
                f"itself, before it compresses"
            )
        return None
