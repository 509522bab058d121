"""The table of features: each line names a folder here that can be deleted with its line and its tests."""

FEATURES = (
    "programs",
    "train",
    "tune",
    "network",
    "preflight",
    "project",
    "review",
    "trackers",
    "until",
    "gate",
    "slurm",
    "kubernetes",
    "manual",
)
