"""Reads the network table of a study, for the page."""

from __future__ import annotations

from harness.reporting.reading import Reading
from harness.reporting.studies import read_network
from results.network import NetworkTable


def read_table(reading: Reading) -> NetworkTable | None:
    """The table that `--network` names, else the one in the study's folder; None: no table is known."""
    return read_network(reading.study, reading.console, reading.given.get("network"))
