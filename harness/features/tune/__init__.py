"""Short runs find the fastest setting, by `bench tune`, and the largest batch, by `--batch-size auto`."""

from results.features import Command, Feature, Kind, PageSection

FEATURE = Feature(
    commands={
        "tune": Command(
            "harness.features.tune.command:tune_command",
            "Find the fastest setting that fits, by measuring, and say what it gains.",
            "decide",
            meant_by=("search", "optimize", "autotune"),
        )
    },
    kinds=(
        Kind(name="tuned", cells="trials of settings", sections=("running", "tuning"), file="tuning.json"),
    ),
    sections={"tuning": PageSection("harness.features.tune.section:tuning_section", after="summary")},
    figures={"tuning": "harness.features.tune.reading:read_tuning"},
    inner=("trials", "batch"),
    hooks={
        "fit_batches": "harness.features.tune.fitting:fit_batches",
        "find_batches": "harness.features.tune.batches:find_batches",
    },
)
