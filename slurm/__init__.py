"""Slurm alone, knowing nothing of benchmarks: sites, job scripts, submission, states, host lists."""
