"""What the columns of a table mean: a positive list. What is not on it is not read, and said to be so.

A name is compared without case, blanks and punctuation (`Tokens/s` is `tokens_per_s`), but for bandwidths,
where Gb is not GB. Every quantity is kept in SI units: seconds, bytes, FLOP/s, shares of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["count", "measured", "fact", "text", "value", "unit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a column holds.

    count: a number that somebody set. measured: a number that came out. fact: words that say what ran; rows
    are compared only if these are equal. text: words in which phrases are looked for. value: a number whose
    unit stands in the column `unit`, which is a unit.
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
    "gpus": ("gpus", "num_gpus", "n_gpus", "devices", "world_size", "ranks"),
    "parameters": ("params", "parameters", "n_params", "num_params"),
    "seq_len": ("seq_len", "sequence_length", "seq_length", "context_length"),
    "layers": ("layers", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "d_model", "hidden"),
    "micro_batch": ("micro_batch", "micro_batch_size", "mbs"),
    "accumulation": ("accumulation", "grad_accum", "gradient_accumulation_steps"),
    "batch_per_device": ("batch_per_gpu", "batch_per_device", "batch_size_per_gpu"),
    "batch_per_replica": ("batch_per_replica", "local_batch_size"),
    "global_batch": ("global_batch", "global_batch_size", "gbs"),
    "tensor": ("tp", "tensor_parallel", "tensor_parallel_size"),
    "pipeline": ("pp", "pipeline_parallel", "pipeline_parallel_size"),
    "context": ("cp", "context_parallel", "context_parallel_size"),
    "data_parallel": ("dp", "data_parallel", "data_parallel_size"),
    "bytes": ("bytes", "size_bytes", "message_bytes"),
    "flops_per_step": ("flops_per_step",),
}
_MEASURED: Mapping[str, Mapping[str, float]] = {
    "samples_per_s": dict.fromkeys(
        ("samples_per_s", "images_per_s", "examples_per_s", "sequences_per_s"), 1.0
    ),
    "tokens_per_s": dict.fromkeys(("tokens_per_s", "tok_per_s"), 1.0),
    "samples_per_s_device": dict.fromkeys(
        ("samples_per_s_per_gpu", "images_per_s_per_gpu", "examples_per_s_per_gpu"), 1.0
    ),
    "tokens_per_s_device": dict.fromkeys(("tokens_per_s_per_gpu", "tok_per_s_per_gpu"), 1.0),
    "step_s": {
        f"{stem}_{unit}": scale
        for stem in ("step", "iteration", "step_time")
        for unit, scale in _TIMES.items()
    },
    "mfu": {"mfu": 1.0, "mfu_percent": 0.01},
    "flops_per_s": {"flops_per_s": 1.0, "tflops_total": 1e12},
    "flops_per_s_device": {"tflops_per_gpu": 1e12, "tflop_per_s_per_gpu": 1e12, "tflops_per_s_per_gpu": 1e12},
    "efficiency": {"scaling_efficiency": 1.0, "scaling_efficiency_percent": 0.01},
    "time_s": {f"time_{unit}": scale for unit, scale in _TIMES.items()},
    "algbw": {f"algbw_{unit}": scale for unit, scale in _SPEEDS.items()},
    "busbw": {f"busbw_{unit}": scale for unit, scale in _SPEEDS.items()},
}
_FACTS = {
    "source": ("source",),
    "model": ("model", "workload"),
    "hardware": ("hardware", "device_name", "gpu_type", "accelerator"),
    "precision": ("precision", "dtype"),
    **{
        name: (name,)
        for name in (
            "strategy", "interconnect", "dataset", "optimizer", "compression", "collective", "backend",
            "device", "link_mbit_per_s", "node_size", "fingerprint",
        )
    },
}  # fmt: skip
_TEXTS = ("notes", "note", "comment", "mfu_or_tflops")

UNITS: Mapping[str, Meaning] = {
    text: Meaning(name=name, kind="measured", scale=scale)
    for name, scale, texts in (
        ("tokens_per_s", 1.0, ("tokens/s", "tok/s", "tokens/s total")),
        ("tokens_per_s_device", 1.0, ("tokens/s/gpu", "tok/s/gpu")),
        ("samples_per_s", 1.0, ("images/s total", "samples/s", "samples/s total", "images/s", "sequences/s")),
        ("samples_per_s_device", 1.0, ("examples/s/gpu", "images/s/gpu", "samples/s/gpu", "sequences/s/gpu")),
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
    yield "throughput", Meaning(name="throughput", kind="value")
    yield "units_per_s", Meaning(name="units_per_s", kind="value", suffix="/s")
    yield "unit", Meaning(name="unit", kind="unit")


HEADERS: Mapping[str, Meaning] = dict(_meanings())
"""Every name that is read, in the spelling that `--map COLUMN=MEANING` takes."""


def meaning(header: str) -> Meaning | None:
    """What a column of this name holds; None if the name is not on the list."""
    name = re.sub(r"\W+", "_", header.replace("/", " per ").replace("%", " percent ")).strip("_")
    return HEADERS.get(name) or HEADERS.get(name.lower())


def unit_meaning(text: str) -> Meaning | None:
    """What a unit's text says; None if it is not on the list."""
    return UNITS.get(re.sub(r"\s*\([^)]*\)", "", text).strip().lower())
