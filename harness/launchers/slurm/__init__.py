"""Jobs of a study on Slurm; the package `slurm` has the code that knows Slurm but not studies."""
