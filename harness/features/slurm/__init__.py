"""`--launcher slurm`: submit jobs to Slurm."""

from results.features import Feature, LauncherPlace

FEATURE = Feature(
    launchers={
        "slurm": LauncherPlace(
            "harness.features.slurm.launcher:SlurmLauncher",
            "submits jobs to Slurm",
            scheduler="slurm",
            job_variable="SLURM_JOB_ID",
            restarts_variable="SLURM_RESTART_COUNT",
        )
    },
)
