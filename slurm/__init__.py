"""A client of Slurm that does not know benchmarks: sites, job scripts, submission, states, host lists."""
