"""`bench project`: project a study to sizes that were not measured, or say what to measure first."""

from results.features import Command, Feature, PageSection

FEATURE = Feature(
    commands={
        "project": Command(
            "harness.cli.project:project_command",
            "Project a study to sizes that were not measured, or say what to measure first.",
            after="report",
        )
    },
    sections={
        "projection": PageSection("reports.page.sections.projection:projection_section", after="curves")
    },
    figures={"projection": "harness.features.project.reading:read_projection"},
)
