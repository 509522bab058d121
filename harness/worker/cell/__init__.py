"""The parts that a rank builds for a cell: workload, data, samples, random state and memory limit."""
