"""A study with a network table."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from builders import NETWORK_HERE, a_network

from reports.analysis.study import StudyFigures


def shown(study: StudyFigures, words: str) -> StudyFigures:
    named = msgspec.structs.replace(NETWORK_HERE, device_name=words, library=words, network=words)
    return replace(study, added={**study.added, "network": a_network(named)})
