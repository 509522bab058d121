"""The files of a training, in the folder that a study keeps for the kind of each of its cells."""

from __future__ import annotations

from pathlib import Path

from results.store import Study


def log_path(study: Study, cell_id: str) -> Path:
    return study.kept_folder(cell_id) / "log.jsonl"


def checkpoints_folder(study: Study, cell_id: str) -> Path:
    return study.kept_folder(cell_id) / "checkpoints"


def weights_path(study: Study, cell_id: str) -> Path:
    """The complete model at the end of a training, which torch.load reads."""
    return study.kept_folder(cell_id) / "weights.pt"
