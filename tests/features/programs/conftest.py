"""A folder with a program's file, which has every part that a file may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from results.cell import Cell

FULL = """\
script: train.py
arguments: --batch {batch_size} --steps 1000000
batch: 16
samples: batch_size * replicas
unit: tokens
units_per_sample: seq
environment: {HF_HUB_OFFLINE: "1"}
files: [configs/*.toml]
log: torchtitan
strategies:
  ddp: ""
  fsdp: --fsdp
  tp2: {arguments: "--tp 2", replica: 2}
settings:
  compile: {eager: "", compiled: --compile}
  length: {short: {arguments: "--seq {seq}", seq: 512}, long: {arguments: "--seq {seq}", seq: 1024}}
impossible:
  - {strategy: fsdp, compile: compiled, reason: the script does not compile shards}
  - {gpus: 1, strategy: fsdp, reason: one rank has nothing to shard}
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """With `train.py`, a configuration and `p.yaml`, the full file."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.toml").write_text("width = 8\n")
    (tmp_path / "train.py").write_text("print('trains')\n")
    (tmp_path / "p.yaml").write_text(FULL)
    return tmp_path


@pytest.fixture
def cell():
    """Makes cells of p.yaml: 4 ranks with 16 samples each, or with other fields."""

    def made(strategy: str = "program:ddp", **fields) -> Cell:
        replica = int(strategy.partition("replica=")[2] or 1)
        given = {"gpus": 4, "micro_batch": 16, "workload": "program:p.yaml", "model_parallel": replica}
        fixed = {"dataset": "own", "device": "cpu", "backend": "gloo", "optimizer": "sgd:lr=0.01"}
        return Cell(strategy=strategy, **{**fixed, **given, **fields})

    return made
