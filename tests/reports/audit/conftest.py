"""Tables whose numbers agree, to plant errors in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from reports.audit.audit import Audit, audit
from reports.audit.files import read_csv

Cells = dict[str, str]


def training_row(gpus: int, tokens_per_s_device: float) -> Cells:
    """One size of a GPT of 24 layers of width 2048 with tp 2, on A100s, printed as a careful author would.

    N = 12 x 24 x 2048^2 = 1,207,959,552. FLOPs a token = 6 N + 12 x 24 x 2048 x 2048 = 8,455,716,864.
    """
    batch = 4 * gpus
    tokens_per_s = tokens_per_s_device * gpus
    flops_per_s = tokens_per_s_device * 8_455_716_864
    return {
        "model": "GPT",
        "hardware": "a100_80gb",
        "precision": "bf16",
        "params": "1207959552",
        "layers": "24",
        "d_model": "2048",
        "seq_len": "2048",
        "gpus": str(gpus),
        "tp": "2",
        "dp": str(gpus // 2),
        "micro_batch": "4",
        "grad_accum": "2",
        "global_batch": str(batch),
        "samples/s": f"{tokens_per_s / 2048:.3f}",
        "tokens/s": f"{tokens_per_s:.0f}",
        "tokens/s/gpu": f"{tokens_per_s_device:.1f}",
        "step_ms": f"{batch * 2048 / tokens_per_s * 1e3:.2f}",
        "tflops/gpu": f"{flops_per_s / 1e12:.1f}",
        "mfu (%)": f"{flops_per_s / 312e12 * 100:.2f}",
    }


@pytest.fixture
def clean() -> list[Cells]:
    """Lines 2 to 5: 2, 4, 8 and 16 GPUs, a little less of a GPU at each."""
    rates = {2: 10_000.0, 4: 9_800.0, 8: 9_500.0, 16: 9_300.0}
    return [training_row(gpus, rate) for gpus, rate in rates.items()]


@pytest.fixture
def row() -> Callable[[int, float], Cells]:
    return training_row


@pytest.fixture
def audited(tmp_path: Path) -> Callable[..., Audit]:
    """The audit of a text, or of rows of cells."""

    def run(table: str | bytes | Sequence[Cells], mapping: Mapping[str, str] | None = None) -> Audit:
        path = tmp_path / "table.csv"
        if isinstance(table, bytes):
            path.write_bytes(table)
        else:
            path.write_text(table if isinstance(table, str) else _csv(table), encoding="utf-8")
        return audit(read_csv(path, mapping or {}))

    return run


def _csv(rows: Sequence[Cells]) -> str:
    heads = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(row.get(head, "") for head in heads) for row in rows]
    return "\n".join([",".join(heads), *lines]) + "\n"
