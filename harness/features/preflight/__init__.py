"""`bench doctor --nodes N`: find the nodes of a cluster that are slow or wrong, before a study needs them."""

from results.features import Feature, Kind, PageSection

_HERE = "harness.features.preflight"
FEATURE = Feature(
    kinds=(
        Kind(
            name="preflight",
            cells="nodes to examine",
            work=f"{_HERE}.worker.examine:examine",
            conduct=f"{_HERE}.call:PreflightConduct",
            sections=("running", "preflight", "outcomes"),
            has_steps=False,
        ),
    ),
    sections={"preflight": PageSection(f"{_HERE}.section:preflight_section", after="outcomes")},
    figures={"preflight": f"{_HERE}.section:read_preflight"},
    hooks={"preflight": f"{_HERE}.call:preflight"},
)
