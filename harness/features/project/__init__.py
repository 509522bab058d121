"""`bench project`: project a study to sizes that were not measured, or say what to measure first."""

from results.features import Command, Feature, PageSection

FEATURE = Feature(
    commands={
        "project": Command(
            "harness.features.project.command:project_command",
            "Project a study to sizes that were not measured, or say what to measure first.",
            "decide",
        )
    },
    sections={
        "projection": PageSection("harness.features.project.section:projection_section", after="curves")
    },
    figures={"projection": "harness.features.project.reading:read_projection"},
)
