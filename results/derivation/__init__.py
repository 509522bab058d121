"""From the records of a run's ranks to its result; no file is read here."""
