"""`bench tune`: find the fastest setting that fits, by measuring."""

from results.features import Command, Feature, Kind, PageSection

FEATURE = Feature(
    commands={
        "tune": Command(
            "harness.cli.tune:tune_command",
            "Find the fastest setting that fits, by measuring, and say what it gains.",
            after="matrix",
        )
    },
    kinds=(
        Kind(name="tuned", cells="trials of settings", sections=("running", "tuning"), file="tuning.json"),
    ),
    sections={"tuning": PageSection("reports.page.sections.tuning:tuning_section", after="summary")},
    figures={"tuning": "harness.features.tune.reading:read_tuning"},
)
