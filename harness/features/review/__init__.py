"""`bench review` and `bench site`: what reviewers say of a study, and an index of many studies."""

from results.features import Command, Feature, PageSection

FEATURE = Feature(
    commands={
        "review": Command(
            "harness.features.review.command:review_command",
            "Exclude runs of a study with a reason, add notes, and approve it.",
            "team",
        ),
        "site": Command(
            "harness.features.review.command:site_command",
            "Write an index of many studies, with their pages, as a static folder.",
            "team",
        ),
    },
    sections={"review": PageSection("harness.features.review.section:review_section", after="outcomes")},
)
