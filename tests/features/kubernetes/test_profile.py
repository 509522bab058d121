"""Profiles of Kubernetes clusters: the example is read, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from approval import approved
from printed_schema import keep_the_schema

from harness.features.kubernetes.profile import PROFILE_FILE, KubernetesProfile, Toleration
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


def test_what_is_left_out(tmp_path) -> None:
    least = read(tmp_path, NEEDED)
    assert least == KubernetesProfile(image="bench:1", volume_claim="results")
    assert (least.mount_path, least.gpu_resource, least.python) == ("/results", "nvidia.com/gpu", "python3")


def test_a_profile_survives_the_file_of_a_job() -> None:
    example = PROFILE_FILE.read(EXAMPLE)
    assert PROFILE_FILE.converted(msgspec.json.decode(msgspec.json.encode(example)), "the profile") == example


MISTAKES = (
    "imag: x",
    "extra_resources: {efa: 1}",
    "extra_resources: {nvidia.com/gpu: 1}",
    "capabilities: [ipc-lock]",
    "volumes: [{name: data, mount_path: /data}]",
    "volumes: [{name: results, mount_path: /d, claim: c}]",
    "volumes: [{name: a, mount_path: /d, claim: c}, {name: a, mount_path: /e, claim: c}]",
    "tolerations: [{kye: a}]",
    "tolerations: [{key: a}, {key: a, effect: Never}]",
    "tolerations: [{key: a, operator: Equal}]",
    "tolerations: [{value: a, operator: Equal}]",
    "tolerations: [{key: a/b/c}]",
    "environment: {A: x, B: 22}",
    "environment: {A-B: x}",
    "environment: {POD_NAME: x}",
    'environment: {A: "a\\0b"}',
    "namespace: ml_systems",
    "namespace: a.b",
    "service_account: Me",
    "priority_class: a..b",
    "image_pull_secrets: [ok, a_b]",
    "queue: a.b",
    "gpu_resource: gpu",
    "gpu_resource: amd.com/gpu",
    "gpu_model: h100",
    "gpu_resource: none\ngpus_per_node: 8",
    "gpus_per_node: 0",
    "memory_per_node: 480GB",
    "shared_memory: 0Gi",
    "mount_path: results",
    "mount_path: /a/../b",
    "mount_path: /a:b",
    "code_path: /a/",
    "user: 0",
    "port: 80",
    "port: 31769",
    "node_selector: {a/b/c: x}",
    "node_selector: {a: x y}",
    "labels: {app.kubernetes.io/name: x}",
    "labels: {kueue.x-k8s.io/queue-name: x}",
    "python: a b",
    "python: ''",
    "time: {maximum: soon}",
)
NO_PROFILES = (
    "image: bench:1",
    "volume_claim: results",
    "image: ''\nvolume_claim: results",
    "- a",
    NEEDED + "image: b",
)


def test_a_mistake_is_named_in_one_line(tmp_path) -> None:
    said = []
    for text in (*(NEEDED + text for text in MISTAKES), *NO_PROFILES):
        with pytest.raises(UsageError) as caught:
            read(tmp_path, text)
        words = str(caught.value)
        assert words.startswith(f"{tmp_path / 'site.yaml'}")
        assert "\n" not in words
        words = words.removeprefix(f"{tmp_path}/").partition(", which has")[0]
        said.append(f"{text.removeprefix(NEEDED)!r}\n    {words}\n")
    approved(Path(__file__).parent / "golden" / "mistakes.txt", "".join(said))


def test_a_profile_that_is_not_there(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"there is no profile of .*docs/sites/kubernetes\.yaml"):
        PROFILE_FILE.read(tmp_path / "none.yaml")


def test_gpus_that_are_asked_for_are_billed(make_profile) -> None:
    placement = Placement(nodes=2, gpus_per_node=3)
    assert make_profile(gpus_per_node=8).billed_gpus(placement) == 6
    assert make_profile(gpu_resource="none").billed_gpus(placement) == 0


def test_the_example_keeps_the_schema_that_is_printed(capsys) -> None:
    keep_the_schema("kubernetes", "sites/kubernetes", capsys)
