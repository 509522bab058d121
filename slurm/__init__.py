"""A client of Slurm, independent of benchmarks: sites, job scripts, submission, states, host lists."""
