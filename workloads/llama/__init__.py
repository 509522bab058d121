"""A Llama's measures and closed forms: Touvron et al. 2023, arXiv:2302.13971; grouped queries as in
arXiv:2307.09288."""

from __future__ import annotations

from dataclasses import dataclass

from results.parts import VALUE_BYTES, ModelParts, Part, Saved, Weight
from workloads.activations import INDEX_BYTES, joined, saved, text_head
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
        """
        t, d, rows = self.seq, self.width, self.rows
        embedding, norm = Weight(rows=rows, columns=d), Weight(rows=d)
        own_head = () if self.tied else (embedding,)
        return ModelParts(
            stem=Part(weights=(embedding,), saved=Saved(whole=INDEX_BYTES * t), input=INDEX_BYTES * t),
            blocks=(joined(self.attention(), self.mlp()),) * self.layers,
            head=text_head((norm, *own_head), self, kept=3 * t * d + t),
            shared_values=rows * d if self.tied else 0,
            logits=VALUE_BYTES * t * rows,
            by_unit=True,
        )

    def attention(self) -> Part:
        """Return the first norm and attention: 2 d^2 parameters of query and output, 2 d k of key and value.

        RMSNorm in single steps saves its input, the input over its size, and 1 / size. Keys and values are
        saved as the inputs of attention, repeated to the number of queries. The result of attention is saved
        twice: head by head, as its queries, and copied token by token.
        """
        t, d, k = self.seq, self.width, self.kv_width
        return Part(
            weights=(
                Weight(rows=d),
                *(Weight(rows=outputs, columns=d, split="rows") for outputs in (d, k, k)),
                Weight(rows=d, columns=d, split="columns"),
            ),
            saved=saved(whole=3 * t * d + t, split=5 * t * d + t * self.heads),
            products=saved(whole=t * d, split=2 * t * d + 2 * t * k + t * self.heads),
            # Cosine and sine of half a head's angles.
            saved_once=VALUE_BYTES * 2 * t * (d // self.heads // 2),
            input=VALUE_BYTES * t * d,
            flops=2 * t * (2 * d**2 + 2 * d * k) + 4 * t**2 * d,
        )

    def mlp(self) -> Part:
        """Return the second norm and the gated MLP: 3 d H parameters, and 4 H values saved a token."""
        t, d, hidden = self.seq, self.width, self.hidden
        return Part(
            weights=(
                Weight(rows=d),
                *(Weight(rows=hidden, columns=d, split="rows") for _ in range(2)),
                Weight(rows=d, columns=hidden, split="columns"),
            ),
            saved=saved(whole=3 * t * d + t, split=4 * t * hidden),
            products=saved(whole=t * d, split=2 * t * hidden),
            flops=2 * t * 3 * d * hidden,
        )
