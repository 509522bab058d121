"""`--launcher manual`: print the command for each host."""

from results.features import Feature, LauncherPlace

FEATURE = Feature(
    launchers={
        "manual": LauncherPlace(
            "harness.features.manual.launcher:ManualLauncher", "prints the command for each host"
        )
    },
)
