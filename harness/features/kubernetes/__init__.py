"""`--launcher kubernetes`: write manifests of jobs."""

from results.features import Feature, LauncherPlace

FEATURE = Feature(
    launchers={
        "kubernetes": LauncherPlace(
            "harness.launchers.kubernetes.launcher:KubernetesLauncher", "writes manifests of jobs"
        )
    },
)
