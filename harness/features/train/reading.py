"""Reads what trained, for the page."""

from __future__ import annotations

from collections.abc import Mapping

from harness.features.train.log import TrainingLog, training_log
from harness.features.train.trained import TrainedCell
from harness.reporting.reading import Reading
from results.errors import StoreError
from results.outcome import Outcome


def read_training(reading: Reading) -> Mapping[str, TrainedCell]:
    """The cells of the study that were trained, by id, in the order of the plans.

    A redaction does not know the words by which a launch ended, or of a checkpoint that could not be written.
    """
    pools = reading.figures.pools
    found = _logs(reading)
    attempts = reading.study.attempts() if found and not reading.redact else {}
    if reading.redact:
        found = {cell_id: log.without_words() for cell_id, log in found.items()}
    lost = (run for pool in pools.values() for run in pool.lost)
    diverged = {run.run_id for run in lost if run.outcome is Outcome.DIVERGED}
    return {
        cell_id: TrainedCell(
            cell=pools[cell_id].cell,
            log=log,
            attempts=attempts,
            diverged=bool(log.launches) and log.launches[-1].run_id in diverged,
        )
        for cell_id, log in found.items()
    }


def _logs(reading: Reading) -> dict[str, TrainingLog]:
    """The logs of the cells that were trained, with a warning for each that is damaged."""
    logs = {}
    for cell_id in reading.figures.pools:
        try:
            logs[cell_id] = log = training_log(reading.study, cell_id)
        except StoreError as error:
            reading.console.warn(f"the report has no training of {cell_id}: {error}")
            continue
        if log.damaged is not None:
            reading.console.warn(log.damaged)
    return {cell_id: log for cell_id, log in logs.items() if log.rows}
