"""`bench export --to`: each cell of a study as a run of wandb or of MLflow."""

from results.features import Feature

_SEND = "harness.features.trackers.send"
FEATURE = Feature(targets={"wandb": f"{_SEND}:to_wandb", "mlflow": f"{_SEND}:to_mlflow"})
