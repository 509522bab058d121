from __future__ import annotations

import msgspec
import pytest
from builders import request_of

from results.cell import StepPolicy
from results.errors import UsageError
from results.plan import Pattern


def test_a_bare_call_on_a_cpu_gets_the_defaults_of_the_design() -> None:
    request = request_of(gpus="1..256")
    assert request.workloads == ("resnet18-32px", "gpt-nano")
    assert request.gpus == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert request.strategies == ("single", "ddp")
    assert request.compressions == ("none",)
    assert (request.collectives, request.links, request.node_size) == (("default",), ("none",), None)
    assert request.scalings == ("weak",)
    assert request.repeats == 3
    assert (request.device, request.backend, request.dataset) == ("cpu", "gloo", "synthetic")
    assert request.batch_sizes == ()
    assert request.steps == StepPolicy()
    assert request.source_folder is None


def test_a_bare_call_on_a_gpu_trains_larger_models_over_nccl() -> None:
    request = request_of(gpus=1, machine_has_cuda=True)
    assert request.workloads == ("resnet50", "gpt2-small")
    assert (request.device, request.backend) == ("cuda", "nccl")


@pytest.mark.parametrize(
    ("device", "machine_has_cuda", "expected"),
    [
        ("auto", False, ("cpu", "gloo")),
        ("auto", True, ("cuda", "nccl")),
        ("cpu", True, ("cpu", "gloo")),
        ("cuda", False, ("cuda", "nccl")),
    ],
)
def test_the_backend_follows_the_device(device, machine_has_cuda, expected) -> None:
    request = request_of(gpus=1, device=device, machine_has_cuda=machine_has_cuda)
    assert (request.device, request.backend) == expected


def test_a_named_backend_stays() -> None:
    assert request_of(gpus=1, device="cuda", backend="gloo").backend == "gloo"


def test_specs_are_canonical_and_distinct() -> None:
    request = request_of(gpus=2, strategy="ddp:bucket_mb=25,ddp,ddp:bucket_mb=50", workload="resnet50:px=224")
    assert request.strategies == ("ddp", "ddp:bucket_mb=50.0")
    assert request.workloads == ("resnet50",)
    assert request_of(gpus=2, optimizer="sgd:momentum=0.9:lr=0.05").optimizer == "sgd:lr=0.05"
    collectives = request_of(gpus=2, collective="hierarchical:via=shards,ring,hierarchical").collectives
    assert collectives == ("hierarchical", "ring")
    assert request_of(gpus=2, link="1000mbit,none,1Gbit,0.1gbit").links == ("1gbit", "none", "100mbit")


@pytest.mark.parametrize(
    ("options", "has_links"),
    [
        ({}, False),
        ({"link": "none"}, False),
        ({"link": "none,1gbit"}, True),
        ({"include": [Pattern(workload="mlp", strategy="ddp", gpus=2, batch_size=8, link="none")]}, False),
        ({"include": [Pattern(workload="mlp", strategy="ddp", gpus=2, batch_size=8, link="1gbit")]}, True),
    ],
)
def test_a_request_knows_whether_it_has_links(options, has_links) -> None:
    assert request_of(gpus=2, **options).has_links is has_links


@pytest.mark.parametrize(("size", "per_node"), [(2, 4), (4, 4), (1, 3), (8, None)])
def test_virtual_nodes_that_fit_real_ones_pass(size, per_node) -> None:
    assert request_of(gpus=8, node_size=size, gpus_per_node=per_node).node_size == size


def test_the_step_policy_takes_what_is_given() -> None:
    request = request_of(gpus=1, budget="1m", target=0.1, warmup_steps=20, block_steps=3, quads=0)
    policy = StepPolicy(budget_s=60.0, target=0.1, warmup_max_steps=20, block_steps=3, quads=0)
    assert request.steps == policy


REAL_HOSTS = "--gpus-per-node 4 describes real hosts, but --link connects virtual nodes of one host"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": "gpt-nano:seq=65"}, "seq is at most its context of 64, not 65"),
        ({"collective": "rung"}, "'rung' (did you mean 'ring'?)"),
        ({"link": "none,1gb"}, "--link takes none or a rate like 100mbit"),
        ({"node_size": 0}, "--node-size takes a whole number, at least 1 and at most 1000000000, not 0"),
        ({"backend": "nccl", "device": "cpu"}, "--backend nccl needs --device cuda; use gloo on CPU"),
        ({"gpus": 8, "link": "1gbit", "gpus_per_node": 4}, REAL_HOSTS),
        ({"gpus": 8, "node_size": 3, "gpus_per_node": 4}, "--node-size 3 does not divide --gpus-per-node 4"),
        ({"gpus": 8, "node_size": 8, "gpus_per_node": 4}, "--node-size 8 does not divide --gpus-per-node 4"),
        (
            {"workload": "gpt-nano", "dataset": "digits"},
            "--dataset digits fits none of the workloads: gpt-nano takes synthetic, text",
        ),
    ],
)
def test_a_bad_call_says_what_is_wrong(options, message) -> None:
    with pytest.raises(UsageError) as caught:
        request_of(**{"gpus": 1, **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "pattern", "message"),
    [
        ("include", {"workload": "mlp", "gpus": 2, "batch_size": 8}, "include[0] names no strategy"),
        (
            "exclude",
            {},
            "exclude[0] is empty, and would exclude everything; pass a value, such as gpus: 8, or omit it",
        ),
        ("exclude", {"strategy": "fspd"}, "there is no strategy 'fspd'"),
        ("exclude", {"collective": "rung"}, "there is no collective 'rung'"),
        ("exclude", {"link": "fast"}, "--link takes none or a rate"),
    ],
)
def test_a_bad_pattern_says_which_it_is(key, pattern, message) -> None:
    with pytest.raises(UsageError) as error:
        request_of(gpus=1, **{key: [msgspec.convert(pattern, Pattern)]})
    assert str(error.value).startswith(message)


def test_patterns_are_canonical() -> None:
    given = Pattern(strategy="ddp:bucket_mb=25", collective="hierarchical:via=shards", link="1000mbit")
    request = request_of(gpus=1, exclude=[given])
    assert request.exclude == (Pattern(strategy="ddp", collective="hierarchical", link="1gbit"),)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"workload": "py:mine.net:build"}, True),
        ({"workload": "gpt-nano", "dataset": "text:corpus.txt"}, True),
        ({"workload": "gpt-nano", "dataset": "text:workers=2"}, False),
        ({"workload": "gpt-nano", "dataset": "text"}, False),
    ],
)
def test_a_folder_is_kept_only_where_something_is_read_from_it(tmp_path, options, needed) -> None:
    assert request_of(gpus=1, **options).source_folder == (str(tmp_path) if needed else None)


def test_a_length_goes_to_the_workloads_that_take_one() -> None:
    assert request_of(gpus=2, workload="llama-nano,mlp", seq="32,64").workloads == (
        "llama-nano:seq=32",
        "llama-nano",
        "mlp",
    )


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("mlp", "take no seq="),
        ("llama-nano:seq=16", "gives seq twice"),
        ("llama-nano", "at most its context"),
    ],
)
def test_a_length_that_no_workload_can_have_is_refused(workload, words) -> None:
    with pytest.raises(UsageError, match=words):
        request_of(gpus=2, workload=workload, seq="128")
