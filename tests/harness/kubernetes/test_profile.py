"""Profiles of Kubernetes clusters: the example is read, and mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.launchers.kubernetes.profile import PROFILE_FILE, KubernetesProfile, Toleration
from results.errors import UsageError
from results.plan import Placement
from results.site import SitePrice, TimeLimits

EXAMPLE = Path(__file__).parents[3] / "docs" / "sites" / "kubernetes.yaml"
NEEDED = "image: bench:1\nvolume_claim: results\n"


def read(tmp_path: Path, text: str) -> KubernetesProfile:
    path = tmp_path / "site.yaml"
    path.write_text(text, encoding="utf-8")
    return PROFILE_FILE.read(path)


def test_the_example_says_what_it_says() -> None:
    example = PROFILE_FILE.read(EXAMPLE)
    assert (example.namespace, example.volume_claim, example.gpus_per_node) == (
        "ml-systems",
        "bench-results",
        8,
    )
    assert example.tolerations == (Toleration(key="nvidia.com/gpu", effect="NoSchedule"),)
    assert example.time == TimeLimits(minimum="10m", maximum="12h")
    assert example.price == SitePrice(usd_per_gpu_hour=2.95, source="provider's price list, 2026-03")


def test_what_is_left_out(tmp_path: Path) -> None:
    least = read(tmp_path, NEEDED)
    assert least == KubernetesProfile(image="bench:1", volume_claim="results")
    assert (least.mount_path, least.gpu_resource, least.python) == ("/results", "nvidia.com/gpu", "python3")


def test_a_profile_survives_the_file_of_a_job() -> None:
    example = PROFILE_FILE.read(EXAMPLE)
    assert PROFILE_FILE.converted(msgspec.json.decode(msgspec.json.encode(example)), "the profile") == example


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imag: x", "line 3: imag is not an option (did you mean 'image'?); there are: image,"),
        ("extra_resources: {efa: 1}", "extra_resources: 'efa' is not a resource such as nvidia.com/gpu"),
        ("extra_resources: {nvidia.com/gpu: 1}", "nvidia.com/gpu is gpu_resource, of which bench asks"),
        ("capabilities: [ipc-lock]", "capabilities[0]"),
        ("volumes: [{name: data, mount_path: /data}]", "a volume has either claim or host_path"),
        ("volumes: [{name: results, mount_path: /d, claim: c}]", "results is a volume of bench's own"),
        (
            "volumes: [{name: a, mount_path: /d, claim: c}, {name: a, mount_path: /e, claim: c}]",
            "volumes: names must differ, not a, a",
        ),
        (
            "tolerations: [{kye: a}]",
            "line 3: tolerations[0].kye is not an option (did you mean 'key'?); there are: key",
        ),
        (
            "tolerations: [{key: a}, {key: a, effect: Never}]",
            "line 3: tolerations[1].effect takes NoSchedule, PreferNoSchedule or NoExecute, not 'Never'",
        ),
        ("tolerations: [{key: a, operator: Equal}]", "line 3: tolerations[0]: operator Equal needs a value"),
        (
            "tolerations: [{value: a, operator: Equal}]",
            "line 3: tolerations[0]: without a key, operator is Exists",
        ),
        ("tolerations: [{key: a/b/c}]", "line 3: tolerations[0].key: 'a/b' is not a name"),
        ("environment: {A: x, B: 22}", "line 3: environment.B takes a text, not 22; quote it: '22'"),
        ("environment: {A-B: x}", "environment: 'A-B' is not a variable that a profile may set"),
        ("environment: {POD_NAME: x}", "environment: 'POD_NAME' is not a variable that a profile may set"),
        ('environment: {A: "a\\0b"}', "environment.A: 'a\\x00b' has a character that no variable can hold"),
        ("namespace: ml_systems", "namespace: 'ml_systems' is not a name"),
        ("namespace: a.b", "namespace: 'a.b' is not a name"),
        ("service_account: Me", "service_account: 'Me' is not a name"),
        ("priority_class: a..b", "priority_class: 'a..b' is not a name"),
        ("image_pull_secrets: [ok, a_b]", "image_pull_secrets: 'a_b' is not a name"),
        ("queue: a.b", "queue: 'a.b' is not a name"),
        ("gpu_resource: gpu", "gpu_resource: 'gpu' is not a resource such as nvidia.com/gpu, or none"),
        ("gpu_model: h100", "gpu_model: 'h100' is not in the catalogue of GPUs, which has V100-SXM2-16GB, "),
        (
            "gpu_resource: none\ngpus_per_node: 8",
            "gpu_resource is none, but gpu_model or gpus_per_node is given",
        ),
        ("gpus_per_node: 0", "gpus_per_node takes a whole number, at least 1, not 0"),
        ("memory_per_node: 480GB", "memory_per_node: '480GB' is not a size such as 480Gi"),
        ("shared_memory: 0Gi", "shared_memory: '0Gi' is not a size"),
        ("mount_path: results", "mount_path: 'results' is not a path"),
        ("mount_path: /a/../b", "mount_path: '/a/../b' is not a path"),
        ("mount_path: /a:b", "mount_path: '/a:b' is not a path"),
        ("code_path: /a/", "code_path: '/a/' is not a path"),
        ("user: 0", "line 3: user takes a whole number, at least 1, not 0"),
        ("port: 80", "port takes a whole number, at least 1024 and at most 31768, not 80"),
        # The last of 1000 ports must be below 32768, where those for whoever asks begin.
        ("port: 31769", "port takes a whole number, at least 1024 and at most 31768, not 31769"),
        ("node_selector: {a/b/c: x}", "node_selector: 'a/b' is not a name"),
        ("node_selector: {a: x y}", "node_selector.a: 'x y' is not a label's value"),
        ("labels: {app.kubernetes.io/name: x}", "labels: app.kubernetes.io/name is set by bench"),
        ("labels: {kueue.x-k8s.io/queue-name: x}", "labels: kueue.x-k8s.io/queue-name is set by bench"),
        ("python: a b", "python: 'a b' is not one printable word"),
        ("python: ''", "python: '' is not one printable word"),
        ("time: {maximum: soon}", "time.maximum: 'soon' is not a time"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, NEEDED + text)
    words = str(caught.value)
    assert words.startswith(f"{tmp_path / 'site.yaml'}")
    assert message in words
    assert "\n" not in words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image: bench:1", "volume_claim is missing"),
        ("volume_claim: results", "image is missing"),
        ("image: ''\nvolume_claim: results", "image: '' is not one printable word"),
        ("- a", "a profile of a Kubernetes cluster holds `option: value` lines, such as volume_claim:"),
        (NEEDED + "image: b", ", line 3: image is given twice"),
    ],
)
def test_a_profile_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no profile of .*docs/sites/kubernetes\.yaml"):
        PROFILE_FILE.read(tmp_path / "none.yaml")


def test_gpus_that_are_asked_for_are_billed(make_profile: Callable[..., KubernetesProfile]) -> None:
    placement = Placement(nodes=2, gpus_per_node=3)
    assert make_profile(gpus_per_node=8).billed_gpus(placement) == 6
    assert make_profile(gpu_resource="none").billed_gpus(placement) == 0
