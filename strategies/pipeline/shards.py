"""The stages of a rank in shards: torch's FSDP2, driven by the steps of a schedule.

The blocks of all stages of a rank are units, and what the rank has around them is one more, which nothing
calls as a module. By default each unit is gathered once a step, in its first forward pass; with `reshard`
each block is gathered in each forward and each backward pass of a microbatch. Microbatches add up complete
gradients on each rank, which are averaged into shards after the last one, as torch's PipelineStage does with
modules under FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from strategies.experts.model import ExpertSplit
from strategies.facts import StrategyFacts
from strategies.fsdp.block_choices import BlockChoice
from strategies.fsdp.shards import DeviceGrid, Shards, groups_of


class ShardedStages(Shards):
    """The shards of a rank's stages."""

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[str],
        facts: StrategyFacts,
        grid: DeviceGrid,
        experts: ExpertSplit | None,
    ) -> None:
        """`module` has only what this rank's stages have. Collective over the ranks of these stages."""
        self._reshards = facts.spec.flag("reshard")
        choice = BlockChoice(reshard=self._reshards)
        super().__init__(module, dict.fromkeys(blocks, choice), facts, grid, experts=experts)
        for block in self.blocks:
            # torch would gather ahead in the order of one microbatch's passes.
            block.set_modules_to_backward_prefetch([block])

    def begin(self) -> None:
        """Begin a step: gather what is around the blocks, and add up gradients until `reduce`."""
        # Nothing calls the root, which has to be known before a block is called.
        self._state._lazy_init()
        self._let_average(now=False)
        for block in self.blocks:
            block.set_reshard_after_backward(self._reshards)
        self.unlike.begin()
        self.root.unshard()

    def reduce(self) -> None:
        """Average all gradients into shards, and free what was gathered; collective over the same stages.

        Raises UsageError if ranks have gradients of different parameters, as `UnlikeGradients` does.
        """
        self._let_average(now=True)
        for state in self._state._state_ctx.all_states:
            for group in groups_of(state):
                group.post_backward()
        self._state._root_post_backward_final_callback()
        try:
            self.unlike.refuse(self.named)
        finally:
            self.unlike.end()

    @property
    def _state(self) -> Any:
        # Attributes of torch 2.11 to 2.13, which torch's own PipelineStage uses.
        return self.root._get_fsdp_state()

    def _let_average(self, *, now: bool) -> None:
        self.root.set_requires_gradient_sync(now)
        self.root.set_is_last_backward(now)
        self.root.set_reshard_after_backward(now)
