"""`bench compare`, `baseline`, `history` and `prune`: regressions, by saved figures or by pairs of runs."""

from results.features import Command, Feature, PageSection

FEATURE = Feature(
    commands={
        "compare": Command(
            "harness.cli.compare:compare_command",
            "Compare a study, a run or a baseline with another.",
            after="export",
        ),
        "baseline": Command(
            "harness.cli.baseline:baseline_command",
            "Keep accepted figures as baselines, to compare later studies with them.",
            after="export",
        ),
        "history": Command(
            "harness.cli.history:history_command",
            "Keep nights of a study, and find the night on which a figure changed.",
            after="export",
        ),
        "prune": Command(
            "harness.cli.study:prune_command",
            "Remove old studies that no baseline and no night was made from.",
            after="export",
        ),
    },
    sections={"history": PageSection("reports.page.sections.history:history_section", after="ranks")},
    figures={"nights": "harness.features.gate.reading:read_history"},
    hooks={"nights": "harness.features.gate.reading:nights_of"},
)
