"""`bench matrix --until certain`: a study grows by rounds until the size to buy is certain."""

from results.features import Feature, PageSection

FEATURE = Feature(
    sections={"growth": PageSection("harness.features.until.section:growth_section", after="summary")},
    hooks={"grow": "harness.features.until.rounds:grow"},
)
