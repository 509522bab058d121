"""What the columns of a table mean: a positive list. What is not on it is not read, and said to be so.

A name is compared by its words, in any case and with any punctuation: `Tokens/sec/GPU` is
`tokens_per_s_per_gpu`, and `# of GPUs` is `num_gpus`. Bandwidths keep their case, where Gb is not GB. Every
quantity is kept in SI units: seconds, bytes, FLOP/s, shares of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["count", "measured", "fact", "text", "value", "unit", "repeat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a column holds.

    count: a number that somebody set. measured: a number that came out. fact: words that say what ran; rows
    are compared only if these are equal. text: words in which phrases are looked for. value: a number whose
    unit stands in the column `unit`, which is a unit. repeat: the number or the seed of one of several
    equal runs.
    """

    name: str
    kind: Kind
    scale: float = 1.0
    """From the column's unit to the SI unit of the quantity."""
    suffix: str = ""
    """Of a value: what the unit's text lacks."""


_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_SPEEDS = {
    "GBps": 1e9,
    "GB_per_s": 1e9,
    "Gbps": 1e9 / 8,
    "Gbit_per_s": 1e9 / 8,
    "MBps": 1e6,
    "GiB_per_s": 2.0**30,
}
_COUNTS = {
    "gpus": (
        "gpus", "num_gpus", "n_gpus", "gpu_count", "devices", "num_devices", "n_devices", "accelerators",
        "world_size", "ranks",
    ),
    "parameters": ("params", "parameters", "n_params", "num_params", "model_params", "model_size"),
    "seq_len": ("seq_len", "seqlen", "sequence_length", "seq_length", "max_seq_len", "context_length",
    "context_len"),
    "layers": ("layers", "num_layers", "n_layers", "n_layer", "num_hidden_layers"),
    "hidden": ("hidden_size", "d_model", "hidden", "hidden_dim", "n_embd"),
    "micro_batch": (
        "micro_batch", "micro_batch_size", "microbatch", "microbatch_size", "mbs",
        "per_device_train_batch_size",
    ),
    "accumulation": (
        "accumulation", "grad_accum", "grad_accum_steps", "gradient_accumulation",
        "gradient_accumulation_steps", "ga", "gas",
    ),
    "batch_per_device": ("batch_per_gpu", "batch_size_per_gpu", "per_gpu_batch_size"),
    "batch_per_replica": ("batch_per_replica", "local_batch_size"),
    "global_batch": ("global_batch", "global_batch_size", "gbs"),
    "tensor": ("tp", "tp_size", "tensor_parallel", "tensor_parallel_size"),
    "pipeline": ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size"),
    "context": ("cp", "cp_size", "context_parallel", "context_parallel_size"),
    "data_parallel": ("dp", "dp_size", "data_parallel", "data_parallel_size"),
    "bytes": ("bytes", "size_bytes", "size_b", "message_bytes"),
    "flops_per_step": ("flops_per_step",),
}  # fmt: skip
_SAMPLES = ("samples", "images", "examples", "sequences", "sentences")
_STEPS = (
    "step",
    "iteration",
    "iter",
    "step_time",
    "iteration_time",
    "iter_time",
    "time_per_step",
    "time_per_iteration",
)
_MEASURED: Mapping[str, Mapping[str, float]] = {
    "samples_per_s": dict.fromkeys((f"{what}_per_s" for what in _SAMPLES), 1.0),
    "tokens_per_s": {"tokens_per_s": 1.0, "ktokens_per_s": 1e3},
    "samples_per_s_device": {
        name: 1.0 for what in _SAMPLES for name in (f"{what}_per_s_per_gpu", f"{what}_per_gpu_per_s")
    },
    "tokens_per_s_device": dict.fromkeys(("tokens_per_s_per_gpu", "tokens_per_gpu_per_s", "tgs"), 1.0),
    "step_s": {f"{stem}_{unit}": scale for stem in _STEPS for unit, scale in _TIMES.items()},
    "mfu": {"mfu": 1.0, "mfu_percent": 0.01},
    "hfu": {"hfu": 1.0, "hfu_percent": 0.01},
    "flops_per_s": {"flops_per_s": 1.0, "tflops_total": 1e12},
    "flops_per_s_device": dict.fromkeys(
        (
            "tflops_per_gpu",
            "tflops_per_s_per_gpu",
            "tflops_per_gpu_per_s",
            "per_gpu_tflops_per_s",
            "model_tflops_per_gpu",
            "model_tflops_per_s_per_gpu",
        ),
        1e12,
    ),
    "efficiency": {
        name + percent: scale
        for name in (
            "efficiency",
            "scaling_efficiency",
            "weak_scaling_efficiency",
            "strong_scaling_efficiency",
        )
        for percent, scale in (("", 1.0), ("_percent", 0.01))
    },
    "time_s": {f"time_{unit}": scale for unit, scale in _TIMES.items()},
    "algbw": {f"algbw_{unit}": scale for unit, scale in _SPEEDS.items()},
    "busbw": {f"busbw_{unit}": scale for unit, scale in _SPEEDS.items()},
}
_FACTS = {
    "source": ("source",),
    "model": ("model", "model_name", "workload"),
    "hardware": (
        "hardware", "gpu", "gpu_type", "gpu_model", "gpu_name", "device_name", "device_type", "accelerator",
        "machine", "system",
    ),
    "precision": ("precision", "dtype"),
    "strategy": ("strategy", "parallelism", "config", "configuration", "setup"),
    "collective": ("collective", "operation", "op"),
    **{
        name: (name,)
        for name in (
            "interconnect", "dataset", "optimizer", "compression", "backend", "device", "link_mbit_per_s",
            "node_size",
            "fingerprint", "framework",
        )
    },
}  # fmt: skip
_TEXTS = ("notes", "note", "comment", "comments", "remarks", "mfu_or_tflops")
_REPEATS = ("run", "repeat", "repetition", "trial", "seed")

QUANTITY_UNITS: Mapping[str, str] = {
    **dict.fromkeys(("samples_per_s", "samples_per_s_device"), "samples/s"),
    **dict.fromkeys(("tokens_per_s", "tokens_per_s_device"), "tokens/s"),
    **dict.fromkeys(("step_s", "time_s"), "s"),
    **dict.fromkeys(("flops_per_s", "flops_per_s_device", "peak"), "FLOP/s"),
    **dict.fromkeys(("mfu", "hfu", "efficiency"), "1"),
    **dict.fromkeys(("algbw", "busbw"), "bytes/s"),
    "bytes": "bytes",
    "flops_per_step": "FLOP",
}
"""The SI unit of a quantity; what is not here is a count."""

UNITS: Mapping[str, Meaning] = {
    text: Meaning(name=name, kind="measured", scale=scale)
    for name, scale, texts in (
        ("tokens_per_s", 1.0, ("tokens/s", "tokens/s total")),
        ("tokens_per_s_device", 1.0, ("tokens/s/gpu",)),
        ("samples_per_s", 1.0, tuple(f"{what}/s{total}" for what in _SAMPLES for total in ("", " total"))),
        ("samples_per_s_device", 1.0, tuple(f"{what}/s/gpu" for what in _SAMPLES)),
        ("step_s", 1e-3, ("ms/iteration", "ms/step")),
        ("step_s", 1.0, ("s/iteration", "s/step")),
        ("flops_per_s_device", 1e12, ("tflop/s/gpu", "tflops/gpu")),
        ("mfu", 0.01, ("% mfu", "mfu %")),
        ("efficiency", 1.0, ("scaling efficiency vs 1 gpu",)),
    )
    for text in texts
}
"""What the text of a column `unit` says of the column `throughput`; text in brackets is left out."""


def _meanings() -> Iterator[tuple[str, Meaning]]:
    for name, headers in _COUNTS.items():
        yield from ((header, Meaning(name=name, kind="count")) for header in headers)
    for name, scales in _MEASURED.items():
        yield from (
            (header, Meaning(name=name, kind="measured", scale=scale)) for header, scale in scales.items()
        )
    for name, headers in _FACTS.items():
        yield from ((header, Meaning(name=name, kind="fact")) for header in headers)
    yield from ((header, Meaning(name=header, kind="text")) for header in _TEXTS)
    yield from ((header, Meaning(name="repeat", kind="repeat")) for header in _REPEATS)
    yield "throughput", Meaning(name="throughput", kind="value")
    yield "units_per_s", Meaning(name="units_per_s", kind="value", suffix="/s")
    yield "unit", Meaning(name="unit", kind="unit")


HEADERS: Mapping[str, Meaning] = dict(_meanings())
"""Every name that is read, in the spelling that `--map COLUMN=MEANING` takes."""
MEASURED = frozenset(_MEASURED)
"""The quantities that come out of a measurement."""
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("msec", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("usec", "microsecond", "microseconds"), "us"),
    **dict.fromkeys(("tok", "toks", "token"), "tokens"),
    **dict.fromkeys(("img", "imgs", "image"), "images"),
    **dict.fromkeys(("sample",), "samples"),
    **dict.fromkeys(("tflop", "teraflop", "teraflops"), "tflops"),
    **dict.fromkeys(("number", "no"), "num"),
    **dict.fromkeys(("pct",), "percent"),
}
"""Spellings of one word."""
_SILENT = frozenset({"of", "the", "avg", "average", "mean", "median", "total", "measured", "throughput"})
"""Words of a header that do not change which quantity it names."""


@lru_cache(maxsize=4096)
def canonical_words(text: str) -> str:
    """A name in its canonical words: `# of GPUs` and `Num GPUs` are `num_gpus`."""
    text = text.replace("#", " num ").replace("/", " per ").replace("%", " percent ").lower()
    return "_".join(_WORDS.get(word, word) for word in re.split(r"[\W_]+", text) if word)


_BY_WORDS: Mapping[str, Meaning] = {canonical_words(header): meant for header, meant in HEADERS.items()}


@lru_cache(maxsize=4096)
def meaning(header: str) -> Meaning | None:
    """What a column of this name holds; None if the name is not on the list."""
    exact = re.sub(r"\W+", "_", header.replace("/", " per ").replace("%", " percent ")).strip("_")
    if re.match(r"(?i)(alg|bus)bw", exact):
        return HEADERS.get(exact[:5].lower() + exact[5:])
    named = canonical_words(header).replace("_per_device", "_per_gpu")
    if named in _BY_WORDS:
        return _BY_WORDS[named]
    plain = "_".join(word for word in named.split("_") if word not in _SILENT)
    return _BY_WORDS.get(plain) if plain != "unit" else None


@lru_cache(maxsize=4096)
def unit_meaning(text: str) -> Meaning | None:
    """What a unit's text says; None if it is not on the list."""
    text = re.sub(r"\s*\([^)]*\)", "", text).strip().lower()
    if text in UNITS:
        return UNITS[text]
    meant = meaning(text)
    return meant if meant is not None and meant.kind == "measured" else None
