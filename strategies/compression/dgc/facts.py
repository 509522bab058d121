"""`dgc` without torch."""

from __future__ import annotations

from types import MappingProxyType

from results.cell import Cell
from results.spec import Option
from strategies.compression.facts import RATIO, SELECT, WARMUP, CompressorFacts
from strategies.compression.promise import Chosen, CompressorPromise, Forgotten, WireBytes
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

    def count_sent(self, values: int, before: int) -> int:
        """During the warm-up the share falls from 25 % to the final one, by the same factor in each step."""
        final, ramp = self.spec.ratio, self.spec.integer("warmup")
        ratio = final if before >= ramp else max(final, 0.25 * (final / 0.25) ** (before / ramp))
        return max(1, round(ratio * values))

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        size = WireBytes(of=lambda values, ranks, before: 8 * self.count_sent(values, before))
        return size, self.largest_sent(), Chosen(count=self.count_sent), Forgotten(count=self.count_sent)
