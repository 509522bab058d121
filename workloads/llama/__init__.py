"""A Llama's measures and closed forms: Touvron et al. 2023, arXiv:2302.13971; grouped queries as in
arXiv:2307.09288."""

from __future__ import annotations

from dataclasses import dataclass

from results.parts import VALUE_BYTES, ModelParts, Part, Saved, Weight
from workloads.activations import INDEX_BYTES, saved, text_head
from workloads.shape import TextShape, WorkloadFacts


@dataclass(frozen=True, kw_only=True)
class LlamaShape(TextShape):
    """The measures of a Llama."""

    kv_heads: int
    """Heads of keys and values, each shared by `heads / kv_heads` heads of queries."""
    hidden: int
    """Width between the matrices of the gated MLP."""
    tied: bool
    """Whether the head is the token embedding."""
    theta: float = 10_000.0
    """Base of the rotary positions' wavelengths."""

    @property
    def kv_width(self) -> int:
        """Width of keys and values."""
        return self.width // self.heads * self.kv_heads

    def facts(self) -> WorkloadFacts:
        return self.text_facts(
            family="llama",
            builder="workloads.llama.model:build_llama",
            parts=self.parts(),
            heads=(self.heads, self.kv_heads),
        )

    def parts(self) -> ModelParts:
        """There are V d (twice if the head is its own) + L (2 d^2 + 2 d k + 3 d H + 2 d) + d parameters for L
        blocks, keys of width k and an MLP of width H, without biases. L (2 T (2 d^2 + 2 d k + 3 d H) + 4
        T^2 d) + 2 T d V FLOPs.

        A block is query and output 2 d^2, key and value 2 d k, MLP 3 d H and two norms of d. It saves 11 T d
        + 4 T H + T (h + 2) values, and T d / h for any batch. RMSNorm in single steps saves its input, the
        input over its size, and 1 / size. Keys and values are saved as the inputs of attention, repeated to
        the number of queries. The result of attention is saved twice: head by head, as its queries, and
        copied token by token.
        """
        t, d, k, hidden, rows = self.seq, self.width, self.kv_width, self.hidden, self.rows
        embedding, norm = Weight(rows=rows, columns=d), Weight(rows=d)
        block = Part(
            weights=(
                norm,
                *(Weight(rows=outputs, columns=d, split="rows") for outputs in (d, k, k)),
                Weight(rows=d, columns=d, split="columns"),
                norm,
                *(Weight(rows=hidden, columns=d, split="rows") for _ in range(2)),
                Weight(rows=d, columns=hidden, split="columns"),
            ),
            saved=saved(whole=6 * t * d + 2 * t, split=5 * t * d + 4 * t * hidden + t * self.heads),
            products=saved(whole=2 * t * d, split=2 * t * d + 2 * t * k + 2 * t * hidden + t * self.heads),
            # Cosine and sine of half a head's angles.
            saved_once=VALUE_BYTES * 2 * t * (d // self.heads // 2),
            input=VALUE_BYTES * t * d,
            flops=2 * t * (2 * d**2 + 2 * d * k + 3 * d * hidden) + 4 * t**2 * d,
        )
        own_head = () if self.tied else (embedding,)
        return ModelParts(
            stem=Part(weights=(embedding,), saved=Saved(whole=INDEX_BYTES * t), input=INDEX_BYTES * t),
            blocks=(block,) * self.layers,
            head=text_head((norm, *own_head), self, kept=3 * t * d + t),
            shared_values=rows * d if self.tied else 0,
            logits=VALUE_BYTES * t * rows,
            by_unit=True,
        )
