"""`--launcher kubernetes`: write manifests of jobs."""

from results.features import Feature, LauncherPlace

FEATURE = Feature(
    launchers={
        "kubernetes": LauncherPlace(
            "harness.features.kubernetes.launcher:KubernetesLauncher", "writes manifests of jobs"
        )
    },
)
