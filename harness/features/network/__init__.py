"""`bench network`: measure collectives over groups of ranks, and show them in a study's page."""

from results.features import Command, Feature, Given, Kind, PageSection

FEATURE = Feature(
    commands={
        "network": Command(
            "harness.features.network.command:network_command",
            "Measure collectives over groups of ranks: the network table of a machine or cluster.",
            "machine",
        )
    },
    kinds=(
        Kind(
            name="network",
            cells="places to measure the network",
            work="harness.features.network.worker.measure:measure_network",
            conduct="harness.features.network.order:NetworkConduct",
            sections=("running", "network", "outcomes", "review"),
            has_steps=False,
        ),
    ),
    sections={
        "network": PageSection("harness.features.network.section:network_section", after="communication")
    },
    given={"network": Given("FILE", "network table of bench network; STUDY/network.json if left out")},
    figures={"network": "harness.features.network.reading:read_table"},
)
