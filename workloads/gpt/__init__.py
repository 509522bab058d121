"""A GPT-2's measures and closed forms: Radford et al. 2019, table 2."""

from __future__ import annotations

from dataclasses import dataclass

from results.parts import VALUE_BYTES, ModelParts, Part, Saved, Weight
from workloads.activations import INDEX_BYTES, linear, saved, text_head
from workloads.shape import TextShape, WorkloadFacts


@dataclass(frozen=True, kw_only=True)
class GPTShape(TextShape):
    """The measures of a GPT-2; its `context` is the number of positions that have an embedding."""

    def facts(self) -> WorkloadFacts:
        return self.text_facts(
            family="gpt",
            builder="workloads.gpt.model:build_gpt",
            parts=self.parts(),
            heads=(self.heads,),
        )

    def parts(self) -> ModelParts:
        """There are V d + C d + L (12 d^2 + 13 d) + 2 d parameters for C positions and L blocks: the head is
        the token embedding and adds nothing. L (24 T d^2 + 4 T^2 d) + 2 T d V FLOPs.

        A block is qkv 3 d^2 + 3 d, projection d^2 + d, MLP 8 d^2 + 5 d and two norms of 2 d. It saves
        16 T d + T (h + 4) values, of which tensor parallelism splits 12 T d + T h.
        """
        t, d, rows = self.seq, self.width, self.rows
        norm = (Weight(rows=d), Weight(rows=d))
        block = Part(
            weights=(
                *norm,
                *linear(d, 3 * d, by="outputs"),
                *linear(d, d, by="inputs"),
                *norm,
                *linear(d, 4 * d, by="outputs"),
                *linear(4 * d, d, by="inputs"),
            ),
            # `whole`: inputs and results of both norms. `split`: query, key, value, the result of attention,
            # and input and result of GELU.
            saved=saved(whole=4 * t * d + 4 * t, split=12 * t * d + t * self.heads),
            products=saved(whole=2 * t * d, split=8 * t * d + t * self.heads),
            input=VALUE_BYTES * t * d,
            flops=24 * t * d**2 + 4 * t**2 * d,
        )
        return ModelParts(
            stem=Part(
                weights=(Weight(rows=rows, columns=d), Weight(rows=self.context, columns=d)),
                saved=Saved(whole=INDEX_BYTES * t),
                saved_once=INDEX_BYTES * t,
                input=INDEX_BYTES * t,
            ),
            blocks=(block,) * self.layers,
            head=text_head(norm, self, kept=2 * t * d + 2 * t),
            shared_values=rows * d,
            logits=VALUE_BYTES * t * rows,
            by_unit=True,
        )
