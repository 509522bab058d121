"""Jobs of a study on Slurm; what knows Slurm and nothing of studies is the package `slurm`."""
