from __future__ import annotations

import msgspec
import pytest

from results.environment import CodeVersion, Environment, Program, unlike_devices

POOLING = {
    "device_name": "Other CPU",
    "cpu_model": "Other CPU",
    "python": "3.12.1",
    "torch": "2.12.0",
    "driver": "570.1",
    "cuda": "12.8",
    "nccl": "2.27.3",
    "threads": 2,
    "nccl_settings": {"NCCL_ALGO": "Ring"},
    "nodes": 2,
    "gpus_per_node": 2,
    "transports": ("TCP sockets (NET/Socket)",),
    "code": CodeVersion(code_hash="0ther", commit="abc1234", dirty=False),
}
NOT_POOLING = {
    "host": "node-b",
    "os": "Linux 6.2",
    "device_memory_bytes": 1,
    "cores": 4,
    "device_uuid": "GPU-1",
    "pinned_cores": (3,),
    "allocation": "slurm 17",
    "attention": ("math",),
    "interfaces": {"GLOO_SOCKET_IFNAME": "eth0"},
    # Older records lack these: runs are compared pair by pair.
    "settings": {"FI_PROVIDER": "efa"},
    "program": Program(names_hash="aa", tensors={}, modules={}),
    "process_group": "ProcessGroupGloo",
    "code": CodeVersion(code_hash="c0de", commit="fffffff", dirty=True),
}


def test_a_fingerprint_is_twelve_hex_digits_that_stay(environment_of) -> None:
    assert environment_of().fingerprint == "18701de82745"


@pytest.mark.parametrize("fact", NOT_POOLING)
def test_a_fingerprint_stays_with_all_else(environment_of, fact) -> None:
    other = environment_of(**{fact: NOT_POOLING[fact]})
    assert other != environment_of()
    assert other.fingerprint == environment_of().fingerprint


def test_a_later_cell_of_a_launch_may_connect_more_inside_a_node(environment_of) -> None:
    alone = environment_of(transports=("InfiniBand (NET/IB)",))
    after_others = environment_of(transports=("InfiniBand (NET/IB)", "NVLink (P2P/CUMEM)"))
    assert after_others.fingerprint == alone.fingerprint != environment_of().fingerprint


def test_every_fact_is_known_to_pool_or_not_to() -> None:
    # A new field of Environment has to be put into one of the tables above.
    assert {*POOLING, *NOT_POOLING} == set(Environment.__struct_fields__)


def test_each_pooling_fact_gives_a_fingerprint_of_its_own(environment_of) -> None:
    fingerprints = {environment_of(**{fact: value}).fingerprint for fact, value in POOLING.items()}
    assert len({*fingerprints, environment_of().fingerprint}) == len(POOLING) + 1


def test_the_order_of_the_settings_does_not_count(environment_of) -> None:
    one = environment_of(nccl_settings={"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"})
    other = environment_of(nccl_settings={"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"})
    assert one.fingerprint == other.fingerprint


def test_a_fingerprint_is_the_same_from_a_file(environment_of) -> None:
    environment = environment_of(nccl_settings={"NCCL_ALGO": "Ring"}, pinned_cores=(0, 1))
    again = msgspec.json.decode(msgspec.json.encode(environment), type=Environment)
    assert again.fingerprint == environment.fingerprint


def test_code_of_other_packages_gives_a_fingerprint_of_its_own(environment_of) -> None:
    def using(code: str) -> str:
        used = CodeVersion(
            code_hash="c0de", commit="abc1234", dirty=False, extensions={"strategy gossip": code}
        )
        return environment_of(code=used).fingerprint

    plain = environment_of().fingerprint
    assert len({plain, using("elsewhere 1.0 aa"), using("elsewhere 1.1 aa"), using("elsewhere 1.0 bb")}) == 4


def test_devices_of_two_kinds_on_one_host_are_told(environment_of) -> None:
    kinds = [("a", "H100"), ("a", "A100"), ("b", "H100"), ("a", "H100")]
    ranks = [environment_of(host=host, device_name=name) for host, name in kinds]
    expected = "the devices of a differ, and each step waits for the slowest: "
    assert unlike_devices(ranks) == [expected + "H100 (ranks 0, 3), A100 (ranks 1)"]
    assert unlike_devices(ranks[2:]) == []
