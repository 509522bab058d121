"""Site profiles: the examples are read, mistakes are named, and what follows from a profile is right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

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
def test_every_example_is_read(name: str) -> None:
    assert SITE_FILE.read(SITES / name).partition is not None


def test_the_plain_example_says_what_it_says() -> None:
    profile = SITE_FILE.read(SITES / "plain.yaml")
    assert profile.partition == "gpu"
    assert profile.gpu_request == "gres"
    assert profile.memory_per_node == "0"
    assert profile.setup[1] == "module load cuda/12.8"
    assert profile.environment["NCCL_SOCKET_IFNAME"] == "ib0"
    assert profile.price == SitePrice(usd_per_gpu_hour=2.5, source="internal accounting, 2026-01")


def test_the_pyxis_example_has_a_container() -> None:
    profile = SITE_FILE.read(SITES / "pyxis.yaml")
    assert profile.container is not None
    assert profile.container.mounts == ("/shared/bench:/shared/bench", "/local/bench:/local/bench")
    assert profile.directives == {"switches": "1@2:00:00"}
    assert (profile.python, profile.container.python) == ("/shared/bench/.venv/bin/python", "python3")


def test_python_is_the_submitting_one_and_the_images() -> None:
    assert SiteProfile().python is None
    assert Container(image="x.sqsh").python == "python3"


def test_the_cpu_example_asks_for_no_gpus() -> None:
    profile = SITE_FILE.read(SITES / "cpu.yaml")
    assert profile.gpu_request == "none"
    assert profile.billed_gpus(Placement(nodes=4, gpus_per_node=4)) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "partiton: gpu",
            "line 1: partiton is not an option (did you mean 'partition'?); there are: partition,",
        ),
        ("time: {maximun: 1h}", "line 1: time.maximun is not an option (did you mean 'maximum'?)"),
        ("account: 0123", "line 1: YAML reads 0123 as another number"),
        ("qos: no", "line 1: qos takes a text, not no; quote it: 'no'"),
        ("gpus_per_node: 0", "gpus_per_node takes a whole number, at least 1, not 0"),
        ("gpus_per_node: eight", "line 1: gpus_per_node takes a whole number, at least 1, not 'eight'"),
        (
            "gpu_request: gpu",
            "line 1: gpu_request takes gres, gpus-per-node, gpus-per-task or none, not 'gpu'",
        ),
        (
            "environment: {A: x, NCCL_IB_TIMEOUT: 22}",
            "line 1: environment.NCCL_IB_TIMEOUT takes a text, not 22; quote it: '22'",
        ),
        (
            "directives: {comment: x, nice: 5}",
            "line 1: directives.nice takes a text or true or false, not 5; quote it: '5'",
        ),
        ("setup: module load cuda", "line 1: setup takes a list, not 'module load cuda'"),
        ("time: {maximum: 24:00:00}", "line 1: YAML reads 24:00:00 as another number"),
        ("time: {maximum: '24 hours'}", "time.maximum: '24 hours' is not a time such as 90s, 30m"),
        ("time: {minimum: 2h, maximum: 1h}", "line 1: time: minimum 2h is more than maximum 1h"),
        ("time: {safety_factor: 0.5}", "time.safety_factor takes a number, at least 1, not 0.5"),
        ("time: {signal: 1d}", "line 1: time: signal 1d is earlier than Slurm can tell: 65535 s"),
        ("price: {usd_per_gpu_hour: 2}", "line 1: price: source is missing"),
        ("memory_per_node: 480 GB", "memory_per_node: '480 GB' is not a size such as 480G, or 0 for all"),
        ('partition: "a\\nb"', "partition: it cannot hold the character '\\n'"),
        ('account: ""', "account: it is empty; leave it out"),
        ('python: ""', "python: it is empty; leave it out"),
        ('python: "a\\nb"', "python: it cannot hold the character '\\n'"),
        ("python: 3.11", "line 1: python takes a text, not 3.11; quote it: '3.11'"),
        ('container: {image: a, python: " "}', "line 1: container.python: it is empty; leave it out"),
        (
            "gpu_request: none\ngpu_type: h100",
            "gpu_request is none, but gpu_type, gpu_model or gpus_per_node is given",
        ),
        (
            "gpu_request: none\ngpu_model: T4-16GB",
            "gpu_request is none, but gpu_type, gpu_model or gpus_per_node",
        ),
        ("gpu_model: h100", "gpu_model: 'h100' is not in the catalogue of GPUs, which has V100-SXM2-16GB, "),
        ("directives: {gres: 'gpu:8'}", "directives: gres has a key of its own here, gpu_request"),
        ("directives: {gres: 'nic:1,gpu:8'}", "directives: gres has a key"),
        ("directives: {hetjob: true}", "directives: hetjob would give a job unlike nodes, and all"),
        ("directives: {output: x}", "directives: output is for the job to decide"),
        ("directives: {contiguous: false}", "directives: contiguous is false; leave it out"),
        ("directives: {-N: '4'}", "directives: '-N' is not a long option of sbatch"),
        ('directives: {comment: "a\\nb"}', "directives.comment: it cannot hold the character '\\n'"),
        ("environment: {A-B: x}", "environment: 'A-B' is not a variable that a job may set"),
        ("environment: {SLURM_CONF: x}", "environment: 'SLURM_CONF' is not a variable that a job may set"),
        ('setup: ["a\\r\\nb"]', "setup and node_setup: a script cannot hold the character '\\r'"),
        ("container: {image: a, mounts: [/a]}", "line 1: container.mounts: '/a' is not FROM:TO"),
        (
            "container: {image: a, mounts: ['/a:/b,/c']}",
            "line 1: container.mounts: '/a:/b,/c' is not FROM:TO",
        ),
        ("container: {image: a, mounts: ['/a b:/c']}", "line 1: container.mounts: '/a b:/c' is not FROM:TO"),
        ("container: {mounts: []}", "line 1: container: image is missing"),
        ("- a", "a site profile holds `option: value` lines"),
        ("", "a site profile holds `option: value` lines"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        site(tmp_path, text)
    words = str(caught.value)
    assert words.startswith(f"{tmp_path / 'site.yaml'}")
    assert message in words
    assert "\n" not in words


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
def test_what_yaml_would_take_or_trip_over_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        site(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'site.yaml'}{message}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
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
