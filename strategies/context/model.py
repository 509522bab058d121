"""Context parallelism: each rank of a group computes a part of the tokens of every sequence.

Only attention sees tokens of other ranks. Calls of `scaled_dot_product_attention` in a block are replaced by
one of two exchanges. Ulysses (Jacobs et al. 2023, arXiv:2309.14509) gives each rank all tokens of a part of
the heads. `gathered` gives each rank all keys and values (Llama 3, arXiv:2407.21783, section 3.3.2); under a
causal mask a rank then has one chunk near the head and one near the tail, so that all ranks do equal work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.collectives.link import Link
from strategies.context.facts import ULYSSES, pieces
from strategies.training.checkpointing import wrap_forward
from strategies.training.layouts import layout_module
from strategies.training.loss import Batch, Loss

_POSITIONS = ("positions", "position_ids")
"""Arguments of a model's forward by which it takes the places of its tokens."""
_OPTIONS = ("attn_mask", "dropout_p", "is_causal")
"""Arguments of `scaled_dot_product_attention` after the tensors that may be given by position."""
_WEIGHTS = ("weight", "size_average", "ignore_index")
"""Arguments of torch's cross-entropy after outputs and targets that may be given by position."""
_OTHERWISE = "use a strategy without cp"


class ContextSplit:
    """The part of each sequence that this rank computes, and the attention over all of its tokens."""

    def __init__(self, module: nn.Module, layout: ModelLayout, link: Link, attention: str) -> None:
        """Replace attention in the blocks of `module`, in place.

        Raises UsageError for a model that does not take the positions of its tokens.
        """
        self._link, self._ulysses = link, attention == ULYSSES
        self._pieces = pieces(attention, link.size)
        self._chunks = [link.rank] if self._ulysses else [link.rank, self._pieces - 1 - link.rank]
        """This rank's chunks of the pieces of a sequence."""
        hint = " (models that find packed documents make one if positions have a gap: try attention=ulysses)"
        self._gap = "" if self._ulysses else hint
        self._causal: dict[tuple[int, int], Any] = {}
        """The mask of a causal chunk, by the number of its queries and of the keys that they see."""
        self._splits = self._attended = self._checked = False
        self._weighing = _Weighing()
        names = list(inspect.signature(module.forward).parameters)
        self._takes = next((name for name in _POSITIONS if name in names), "")
        self._names = [name for name in names if name != self._takes]
        if not self._takes:
            raise UsageError(
                f"context parallelism gives the model the positions of its tokens, and forward of "
                f"{type(module).__name__} takes neither {' nor '.join(_POSITIONS)}: add one, or {_OTHERWISE}"
            )
        for name in layout.blocks or ("",):
            block = layout_module(module, name) if name else module
            wrap_forward(block, partial(partial, self._forward, name or "the model"))

    def part(self, batch: Batch, loss: Loss) -> Batch:
        """Return this rank's tokens of a batch (inputs, targets), with their positions among the inputs.

        The model computes parts of sequences until `end` is called. Before and after, for example in a
        validation, each rank computes the sequences that it is given.

        Raises UsageError for a batch of another form, for a length that does not divide, and for targets that
        a loss ignores.
        """
        inputs, targets = self._split_targets(batch, loss)
        length = targets.shape[1]
        named = self._named(inputs)
        self._refuse_gaps(named, targets)
        self._weighing.targets = targets
        own = torch.arange(length, device=targets.device).view(self._pieces, -1)[self._chunks].flatten()

        def cut(value: Any) -> Any:
            whole = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            return value.index_select(1, own) if whole else value

        positions = own if self._takes == "positions" else own[None]
        size = length // self._pieces
        for place in () if self._ulysses else self._chunks:
            # No mask of all pairs of tokens is stored where a kernel knows these. Within selective
            # checkpointing torch cannot make them.
            self._causal[size, (place + 1) * size] = causal_lower_right(size, (place + 1) * size)
        self._splits = True
        return {name: cut(value) for name, value in named.items()} | {self._takes: positions}, cut(targets)

    def even(self, loss: Loss) -> Callable[[Any, Any], Tensor]:
        """Return the loss of one rank's tokens; its mean over the ranks is the loss of whole sequences.

        It raises UsageError, on all ranks alike, if torch's cross-entropy has weights of classes, or ignores
        a class of the batch (on a GPU: of the first batch).
        """
        assert callable(loss)
        own = loss

        def weighed(outputs: Any, targets: Any) -> Tensor:
            with self._weighing:
                return own(outputs, targets)

        return weighed

    def end(self) -> None:
        """Let the model compute whole sequences again."""
        self._splits = False

    def _split_targets(self, batch: Batch, loss: Loss) -> tuple[Any, Tensor]:
        """Return inputs and targets. Raises UsageError for targets whose tokens cannot be split."""
        if not callable(loss) or not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(
                f"context parallelism splits batches of (inputs, targets) for a loss(outputs, targets), "
                f"because a model or step that shifts the targets itself loses one a chunk: {_OTHERWISE}"
            )
        inputs, targets = batch
        if not isinstance(targets, Tensor) or targets.dim() < 2:
            raise UsageError(f"context parallelism splits targets (samples, tokens, ...): {_OTHERWISE}")
        if targets.shape[1] % self._pieces:
            raise UsageError(
                f"{targets.shape[1]} tokens of a sample do not divide into {self._pieces} chunks: "
                f"{_OTHERWISE}"
            )
        return inputs, targets

    def _named(self, inputs: Any) -> dict[str, Any]:
        """Return the inputs by the names of the arguments of forward. Raises UsageError for positions of the
        batch's own."""
        if isinstance(inputs, Mapping):
            if self._takes in inputs:
                raise UsageError(
                    f"context parallelism gives the model the positions of its tokens, and the batch has "
                    f"{self._takes}, of packed documents perhaps: leave them out, or {_OTHERWISE}"
                )
            return dict(inputs)
        given = inputs if isinstance(inputs, tuple | list) else [inputs]
        if len(given) > len(self._names):
            raise UsageError(f"the batch has {len(given)} inputs, and forward takes {', '.join(self._names)}")
        return dict(zip(self._names, given, strict=False))

    def _refuse_gaps(self, inputs: dict[str, Any], targets: Tensor) -> None:
        """Raise UsageError on all ranks alike for tokens that a loss or a mask leaves out. On a GPU only the
        first batch is looked at, because the host would wait for the device."""
        if targets.device.type != "cpu" and self._checked:
            return
        self._checked = True
        if not targets.is_floating_point() and bool((targets < 0).any()):
            raise UsageError(
                f"context parallelism averages over equally many tokens of each rank, and these targets have "
                f"some that a loss ignores (less than 0): leave padding out, or {_OTHERWISE}"
            )
        for name, value in inputs.items():
            if name.endswith("attention_mask") and isinstance(value, Tensor) and not bool(value.all()):
                raise UsageError(
                    f"context parallelism splits sequences of which every token counts, and {name} of the "
                    f"batch leaves some out: leave padding out, or {_OTHERWISE}"
                )

    def _forward(self, name: str, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """Call what a block computes with attention over all tokens."""
        if not self._splits:
            return forward(*inputs, **named)
        self._attended = False
        with _Attention(partial(self._attend, name)):
            result = forward(*inputs, **named)
        if not self._attended:
            _refuse(name, "does not call scaled_dot_product_attention")
        return result

    def _attend(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any
    ) -> Tensor:
        """Return attention of this rank's queries, (n, heads, tokens, size), to the keys of all ranks."""
        self._attended = True
        options = dict(zip(_OPTIONS, others, strict=False)) | named
        if options.pop("attn_mask", None) is not None:
            _refuse(name, f"gives attention an explicit mask, which holds for one rank's tokens{self._gap}")
        if dropout := options.get("dropout_p", 0.0):
            _refuse(name, f"has dropout in attention ({dropout:g}), which ranks would draw apart")
        if not self._ulysses:
            return self._by_all_keys(name, query, key, value, options)
        if query.shape[1] % self._link.size:
            _refuse(name, f"has {query.shape[1]} heads a rank, which {self._link.size} ranks do not divide")
        copies = _copies(key.shape[1], query.shape[1], self._link.size)
        if copies > 1:
            key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
        query, key, value = (_TokensToHeads.apply(each, self._link) for each in (query, key, value))  # type: ignore[no-untyped-call]
        mixed = F.scaled_dot_product_attention(query, key, value, **options)
        result: Tensor = _HeadsToTokens.apply(mixed, self._link)  # type: ignore[no-untyped-call]
        return result

    def _by_all_keys(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        key, value = (_AllTokens.apply(each, self._link) for each in (key, value))  # type: ignore[no-untyped-call]
        if not options.pop("is_causal", False):
            return F.scaled_dot_product_attention(query, key, value, **options)
        size, results = query.shape[2] // 2, []
        if (size, (self._chunks[0] + 1) * size) not in self._causal:
            _refuse(name, f"has {query.shape[2]} queries a rank, which are not its tokens")
        for place, chunk in zip(self._chunks, query.chunk(2, dim=2), strict=True):
            until = (place + 1) * size
            keys, values = key[:, :, :until], value[:, :, :until]
            mask = self._causal[size, until]
            results.append(F.scaled_dot_product_attention(chunk, keys, values, attn_mask=mask, **options))
        return torch.cat(results, dim=2)


def _copies(of_keys: int, of_queries: int, ranks: int) -> int:
    """Return how often the heads of keys are repeated so that `ranks` divide them (grouped queries)."""
    if of_keys % ranks == 0:
        return 1
    groups = of_queries // of_keys
    fitting = (n for n in range(2, groups + 1) if groups % n == 0 and of_keys * n % ranks == 0)
    return next(fitting, 1)


def _refuse(name: str, why: str) -> NoReturn:
    raise UsageError(
        f"context parallelism replaces scaled_dot_product_attention of each block, and {name} {why}: "
        f"{_OTHERWISE}"
    )


class _Attention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention`."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        called = self._attend if function is F.scaled_dot_product_attention else function
        return called(*arguments, **(named or {}))


class _Weighing(TorchFunctionMode):
    """Refuses a cross-entropy whose mean is not over all tokens alike."""

    targets: Tensor
    """The targets of whole sequences, which all ranks have."""
    _checked = False

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        options = dict(named or {})
        if function in (F.cross_entropy, F.nll_loss):
            given = dict(zip(_WEIGHTS, arguments[2:], strict=False)) | options
            self._require_even(given.get("weight"), given.get("ignore_index", -100))
        return function(*arguments, **options)

    def _require_even(self, weight: Tensor | None, ignored: int) -> None:
        looks = self.targets.device.type == "cpu" or not self._checked
        self._checked = True
        if weight is not None or (looks and bool((self.targets == ignored).any())):
            what = f"ignores targets of {ignored}" if weight is None else "has weights of classes"
            raise UsageError(
                f"context parallelism averages over equally many tokens of each rank, and the cross-entropy "
                f"{what}: leave that out, or {_OTHERWISE}"
            )


class _TokensToHeads(torch.autograd.Function):
    """(n, heads, own tokens, size) to (n, own heads, tokens, size)."""

    @staticmethod
    def forward(context: Any, values: Tensor, link: Link) -> Tensor:
        context.link = link
        return _to_heads(values, link)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(gradient, context.link), None


class _HeadsToTokens(torch.autograd.Function):
    """(n, own heads, tokens, size) to (n, heads, own tokens, size)."""

    @staticmethod
    def forward(context: Any, values: Tensor, link: Link) -> Tensor:
        context.link = link
        return _to_tokens(values, link)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _to_heads(gradient, context.link), None


def _to_heads(values: Tensor, link: Link) -> Tensor:
    samples, heads, tokens, size = values.shape
    for_ranks = values.reshape(samples, link.size, heads // link.size, tokens, size).movedim(1, 0)
    received = link.all_to_all(for_ranks.reshape(link.size, -1))
    return received.view(link.size, samples, -1, tokens, size).movedim(0, 2).flatten(2, 3)


def _to_tokens(values: Tensor, link: Link) -> Tensor:
    samples, heads, tokens, size = values.shape
    for_ranks = values.reshape(samples, heads, link.size, tokens // link.size, size).movedim(2, 0)
    received = link.all_to_all(for_ranks.reshape(link.size, -1))
    return received.view(link.size, samples, heads, -1, size).movedim(0, 1).flatten(1, 2)


class _AllTokens(torch.autograd.Function):
    """(n, heads, own tokens, size) of a head and a tail chunk to (n, heads, tokens, size) in order."""

    @staticmethod
    def forward(context: Any, values: Tensor, link: Link) -> Tensor:
        context.link = link
        gathered = link.all_gather(values.flatten()).view(link.size, *values.shape)
        head, tail = gathered.chunk(2, dim=3)
        return torch.cat([*head, *reversed(tail)], dim=2)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        link = context.link
        chunks = gradient.chunk(2 * link.size, dim=2)
        pairs = zip(chunks[: link.size], reversed(chunks[link.size :]), strict=True)
        for_ranks = torch.stack([torch.cat(pair, dim=2) for pair in pairs])
        own = link.reduce_scatter(for_ranks.view(link.size, -1))
        return own.view(for_ranks.shape[1:]), None
