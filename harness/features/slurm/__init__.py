"""`--launcher slurm`: submit jobs to Slurm."""

from results.features import Feature, LauncherPlace

FEATURE = Feature(
    launchers={
        "slurm": LauncherPlace(
            "harness.features.slurm.launcher:SlurmLauncher",
            "submits jobs to Slurm",
            jobs={"scheduler": "slurm", "job": "SLURM_JOB_ID", "restarts": "SLURM_RESTART_COUNT"},
        )
    },
)
