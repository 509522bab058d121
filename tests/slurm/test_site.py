"""Site profiles: the examples are read, mistakes are named, and what follows from a profile is right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from approval import approved

from results.errors import UsageError
from results.plan import Placement
from results.site import SitePrice, TimeLimits
from slurm.site import SITE_FILE, Container, SiteProfile

SITES = Path(__file__).parents[2] / "docs" / "sites"


def site(tmp_path: Path, text: str) -> SiteProfile:
    path = tmp_path / "site.yaml"
    path.write_text(text, encoding="utf-8")
    return SITE_FILE.read(path)


def overridden(base: SiteProfile, values: Mapping[str, object]) -> SiteProfile:
    return SITE_FILE.overridden(base, values, "options of the site")


@pytest.mark.parametrize("name", sorted({path.name for path in SITES.iterdir()} - {"kubernetes.yaml"}))
def test_every_example_is_read(name) -> None:
    assert SITE_FILE.read(SITES / name).partition is not None


def test_the_cpu_example_asks_for_no_gpus() -> None:
    profile = SITE_FILE.read(SITES / "cpu.yaml")
    assert profile.gpu_request == "none"
    assert profile.billed_gpus(Placement(nodes=4, gpus_per_node=4)) == 0


MISTAKES = (
    "partiton: gpu",
    "time: {maximun: 1h}",
    "account: 0123",
    "qos: no",
    "gpus_per_node: 0",
    "gpus_per_node: eight",
    "gpu_request: gpu",
    "environment: {A: x, NCCL_IB_TIMEOUT: 22}",
    "directives: {comment: x, nice: 5}",
    "setup: module load cuda",
    "time: {maximum: 24:00:00}",
    "time: {maximum: '24 hours'}",
    "time: {minimum: 2h, maximum: 1h}",
    "time: {safety_factor: 0.5}",
    "time: {signal: 1d}",
    "price: {usd_per_gpu_hour: 2}",
    "memory_per_node: 480 GB",
    'partition: "a\\nb"',
    'account: ""',
    'python: ""',
    'python: "a\\nb"',
    "python: 3.11",
    'container: {image: a, python: " "}',
    "gpu_request: none\ngpu_type: h100",
    "gpu_request: none\ngpu_model: T4-16GB",
    "gpu_model: h100",
    "directives: {gres: 'gpu:8'}",
    "directives: {gres: 'nic:1,gpu:8'}",
    "directives: {hetjob: true}",
    "directives: {output: x}",
    "directives: {contiguous: false}",
    "directives: {-N: '4'}",
    'directives: {comment: "a\\nb"}',
    "environment: {A-B: x}",
    "environment: {SLURM_CONF: x}",
    'setup: ["a\\r\\nb"]',
    "container: {image: a, mounts: [/a]}",
    "container: {image: a, mounts: ['/a:/b,/c']}",
    "container: {image: a, mounts: ['/a b:/c']}",
    "container: {mounts: []}",
    "- a",
    "",
)


def test_a_mistake_is_named_in_one_line(tmp_path) -> None:
    said = []
    for text in MISTAKES:
        with pytest.raises(UsageError) as caught:
            site(tmp_path, text)
        words = str(caught.value)
        assert words.startswith(f"{tmp_path / 'site.yaml'}")
        assert "\n" not in words
        words = words.removeprefix(f"{tmp_path}/").partition(", which has")[0]
        said.append(f"{text!r}\n    {words}\n")
    approved(Path(__file__).parent / "golden" / "site_mistakes.txt", "".join(said))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "partition: a\naccount: b\npartition: c",
            ", line 3: partition is given twice",
        ),
        ("time:\n  minimum: 1m\n  minimum: 2m", ", line 3: minimum is given twice"),
        ("partition: [a", ", line 1: not readable as YAML"),
        ("partition: !!python/name:os.system x", ", line 1: the tag !!python/name:os.system has no use here"),
        ("[" * 600, ", line 1: nested deeper than any option is"),
    ],
)
def test_what_yaml_would_take_or_trip_over_is_refused(tmp_path, text, message) -> None:
    with pytest.raises(UsageError) as caught:
        site(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'site.yaml'}{message}")


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"there is no site profile .*docs/sites"):
        SITE_FILE.read(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot read"):
        SITE_FILE.read(tmp_path)
    (tmp_path / "binary").write_bytes(b"partition: \xff\xfe")
    with pytest.raises(UsageError, match=r"is not UTF-8 text \(byte 11\)"):
        SITE_FILE.read(tmp_path / "binary")


def test_overriding_replaces_single_values() -> None:
    base = SiteProfile(partition="gpu", account="a", time=TimeLimits(maximum="4h"))
    values = {"partition": "test", "account": None, "time.fixed": "30m", "container.image": "x.sqsh"}
    assert overridden(base, values) == SiteProfile(
        partition="test",
        account="a",
        time=TimeLimits(maximum="4h", fixed="30m"),
        container=Container(image="x.sqsh"),
    )
    assert base.partition == "gpu"


def test_overriding_keeps_what_is_beside() -> None:
    base = SiteProfile(environment={"A": "1"}, price=SitePrice(usd_per_gpu_hour=2, source="list"))
    assert overridden(base, {"environment.B": "2"}).environment == {"A": "1", "B": "2"}
    assert overridden(base, {"price.usd_per_gpu_hour": 3.0}).price == SitePrice(
        usd_per_gpu_hour=3, source="list"
    )


def test_overriding_keeps_the_rules() -> None:
    with pytest.raises(UsageError, match=r"options of the site: time\.fixed: 'soon' is not a time"):
        overridden(SiteProfile(), {"time.fixed": "soon"})
    with pytest.raises(UsageError, match=r"partitoin is not an option"):
        overridden(SiteProfile(), {"partitoin": "x"})


def test_whole_nodes_are_billed_when_they_are_exclusive() -> None:
    placement = Placement(nodes=2, gpus_per_node=1)
    assert SiteProfile(gpus_per_node=8).billed_gpus(placement) == 2
    assert SiteProfile(gpus_per_node=8, exclusive=True).billed_gpus(placement) == 16
    assert SiteProfile(exclusive=True).billed_gpus(placement) is None
