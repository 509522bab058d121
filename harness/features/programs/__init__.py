"""`--workload program:FILE.yaml`: measure programs that are not bench's, by the steps that they take."""

from results.features import Command, Feature, Kind, PageSection

FEATURE = Feature(
    commands={
        "program": Command(
            "harness.features.programs.command:program_command",
            "Check a program that is not bench's own: its steps, ranks and samples.",
            "study",
        )
    },
    kinds=(
        Kind(
            name="program",
            cells="programs",
            work="harness.features.programs.worker.run:run_program",
            proves=False,
            losses="reports.analysis.losses:final_losses",
            phases={
                "start": "starting the program",
                "steps": "following its steps",
                "end": "ending the program",
            },
        ),
    ),
    sections={"program": PageSection("harness.features.programs.section:program_section", after="summary")},
    figures={"program": "harness.features.programs.reading:read_waits"},
    members={
        "workload": {"program": "harness.features.programs.facts:PROGRAM_WORKLOAD"},
        "strategy": {"program": "harness.features.programs.facts:ProgramStrategy"},
    },
    hooks={
        "read": "harness.features.programs.request:translated",
        "order": "harness.features.programs.request:order",
    },
)
