"""The files of a training, in the folder that a study keeps for the kind of each of its cells."""

from __future__ import annotations

import shutil
from pathlib import Path

from results.store import Study


def log_path(study: Study, cell_id: str) -> Path:
    return study.kept_folder(cell_id) / "log.jsonl"


def checkpoints_folder(study: Study, cell_id: str) -> Path:
    return study.kept_folder(cell_id) / "checkpoints"


def weights_path(study: Study, cell_id: str) -> Path:
    """The complete model at the end of a training, which torch.load reads."""
    return study.kept_folder(cell_id) / "weights.pt"


def remove_models(study: Study, cell_id: str) -> None:
    """Remove the checkpoints and the weights of a cell, and keep its log."""
    shutil.rmtree(checkpoints_folder(study, cell_id), ignore_errors=True)
    weights_path(study, cell_id).unlink(missing_ok=True)
