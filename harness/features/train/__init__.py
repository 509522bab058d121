"""`bench train`: train cells to completion, through crashes and restarts."""

from results.features import Command, Feature, Kind, PageSection

FEATURE = Feature(
    commands={
        "train": Command(
            "harness.features.train.command:train_command",
            "Train cells to completion, through crashes and restarts.",
            "train",
        )
    },
    kinds=(
        Kind(
            name="trained",
            cells="trained",
            work="harness.features.train.worker.loop:train_cell",
            conduct="harness.features.train.conduct:TrainConduct",
            sections=("running", "training", "accuracy", "outcomes", "review", "environment"),
            shows="training",
            losses="harness.features.train.trained:final_losses",
            phases={
                "resume": "looking for a checkpoint",
                "train": "training",
                "export": "writing the model",
                "trained": "ending",
            },
        ),
    ),
    sections={
        "training": PageSection("harness.features.train.section:training_section", after=""),
        "accuracy": PageSection("harness.features.train.section:accuracy_section", after=""),
    },
    figures={"training": "harness.features.train.reading:read_training"},
)
