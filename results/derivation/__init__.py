"""From the records of a run's ranks to its result. This package does not read files."""
