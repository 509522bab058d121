"""`bench compare`, `baseline`, `history` and `prune`: regressions, by saved figures or by pairs of runs."""

from results.features import Command, Feature, Given, PageSection

FEATURE = Feature(
    commands={
        "compare": Command(
            "harness.features.gate.command:compare_command",
            "Compare a study, a run or a baseline with another.",
            "team",
            passes="give it after --, as in bench compare --ab A B -- {} ...",
        ),
        "baseline": Command(
            "harness.features.gate.command:baseline_command",
            "Keep accepted figures as baselines, to compare later studies with them.",
            "team",
        ),
        "history": Command(
            "harness.features.gate.command:history_command",
            "Keep nights of a study, and find the night on which a figure changed.",
            "team",
        ),
        "prune": Command(
            "harness.features.gate.command:prune_command",
            "Remove old studies that no baseline and no night was made from.",
            "team",
            removes=True,
        ),
    },
    sections={"history": PageSection("harness.features.gate.section:history_section", after="ranks")},
    given={
        "history": Given(
            "FOLDER",
            "nights of bench history add; ./history if that is there and this is left out",
            commands=("report", "site"),
            default="harness.features.gate.nights:nights_here",
        )
    },
    figures={"nights": "harness.features.gate.nights:read_history"},
    hooks={
        "measure_noise": "harness.features.gate.noise:measure_noise",
        "nights": "harness.features.gate.section:nights_of",
        "status": "harness.features.gate.paired.comparison:status",
    },
)
