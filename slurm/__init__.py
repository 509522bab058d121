"""Slurm alone, knowing nothing of benchmarks. Submission is not built yet; local and manual launches are."""
