"""Names of people and places do not leave the program; the facts needed to read the figures do."""

from __future__ import annotations

import base64
import dataclasses
import re
from typing import get_args

import msgspec
import pytest

from reports.analysis.study import StudyFigures, analyse
from reports.page.export import TextForm, export_text
from reports.page.render import render_figures
from reports.page.tables import TABLES, TableForm, export_table, frame_of
from reports.redaction import Redactor, Told, redactor
from results.outcome import Outcome
from results.record import Proof

UUID = "GPU-8a3f1c22-9b1d-4e55-a0c7-0123456789ab"
SECRETS = (
    "gpu017",
    "cluster.example.edu",
    "alice",
    "/home",
    "/tmp",
    "secret-project",
    "8a3f1c22",
    "10.20.30.40",
    "4711",
    "0000:3b:00.0",
    "1324021057331",
)
"""Each is planted below, and none of them may be anywhere in the output."""


@pytest.fixture
def telling(tmp_path, new_study, new_timing, new_environment):
    """A study whose every text names somebody or some place."""
    study = new_study(tmp_path / "alice-study")
    cells = study.series(
        "weak", "ddp", [2, 4], batch=8, dataset="tokens:file=/home/alice/secret-project/corpus.bin"
    )
    single = study.series("weak", "single", [1], batch=8, workload="py:alice_models:build")[0]
    study.skip("ddp", 8, "no host but gpu017.cluster.example.edu is free", batch=8)
    study.plan(repeats=2)
    here = new_environment(
        host="gpu017.cluster.example.edu",
        allocation="slurm 4711",
        device_uuid=UUID,
        nccl_settings={"NCCL_TOPO_FILE": "/home/alice/topology.xml", "NCCL_SOCKET_IFNAME": "eth0"},
    )
    proof = Proof(
        method="serial-simulation",
        passed=True,
        detail="recomputed by alice on GPU017, bound in /tmp/bound.json",
    )
    warnings = [
        f"device {UUID} at 0000:3b:00.0 (serial number: 1324021057331) was hot",
        "see tcp://10.20.30.40:1",
    ]
    told = {"environment": here, "proof": proof, "warnings": warnings}
    study.run(single, new_timing(step_ms=10, **told))
    study.run(
        single,
        new_timing(
            step_ms=12, **(told | {"environment": msgspec.structs.replace(here, allocation="slurm 4712")})
        ),
    )
    study.run(cells[0], new_timing(step_ms=10, exposed_ms=1, **told))
    reason = "cannot open '/tmp/alice run/rank 0.log' on gpu017: job 4711 of alice@login.cluster.example.edu"
    crashed = new_timing(step_ms=1, outcome=Outcome.CRASHED, reason=reason, environment=here)
    study.run(cells[0], crashed)
    study.run(cells[1], crashed)
    return study


def told(planted) -> Told:
    return Told(planted.study.name, planted.study.plans(), planted.study.collect())


def redacted(planted) -> StudyFigures:
    plain = told(planted)
    hidden = redactor([plain]).study(plain)
    return analyse(hidden.name, hidden.plans, hidden.results)


def whole(html: str) -> str:
    """The page with the files inside it."""
    inside = [base64.b64decode(data).decode() for data in re.findall(r";base64,([A-Za-z0-9+/=]+)", html)]
    return html + "".join(inside)


def leaks(output: str) -> list[str]:
    return [secret for secret in SECRETS if secret in output.lower()]


def test_the_secrets_are_there_before(telling) -> None:
    plain = told(telling)
    page = whole(render_figures(analyse(plain.name, plain.plans, plain.results)))
    assert set(leaks(page)) >= set(SECRETS) - {"8a3f1c22", "1324021057331"}


def test_no_secret_is_in_the_page_or_in_the_tables_inside_it(telling) -> None:
    page = whole(render_figures(redacted(telling)))
    assert leaks(page) == []
    assert "node-1" in page


@pytest.mark.parametrize("form", get_args(TextForm))
def test_no_secret_is_in_a_text(telling, form) -> None:
    output = export_text([redacted(telling)], form)
    assert leaks(output) == []


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("form", get_args(TableForm))
def test_no_secret_is_in_a_table(telling, name, form) -> None:
    assert leaks(export_table([redacted(telling)], name, form).decode("latin-1")) == []


def test_the_commit_versions_and_figures_stay(telling) -> None:
    plain = told(telling)
    before = frame_of([analyse(plain.name, plain.plans, plain.results)], "runs")
    after = frame_of([redacted(telling)], "runs")
    same = [
        "run_id",
        "commit",
        "code_hash",
        "torch",
        "device_name",
        "step_ns",
        "outcome",
        "fingerprint",
        "gpus",
    ]
    assert before[same].equals(after[same])
    assert after["commit"].dropna().unique().tolist() == ["abc1234"]
    settings = redacted(telling).runs[0].environment.nccl_settings
    assert settings["NCCL_SOCKET_IFNAME"] == "eth0"
    assert settings["NCCL_TOPO_FILE"].startswith("path-")


def test_cells_that_hold_a_path_keep_their_runs(telling) -> None:
    frame = frame_of([redacted(telling)], "cells")
    assert frame["dataset"].unique().tolist() == ["tokens:file=path-1", "synthetic"]
    assert frame["runs"].tolist() == [1, 0, 2]
    assert frame["scaling"].tolist() == ["weak"] * 3
    assert redacted(telling).strangers == ()


def test_two_paths_stay_two_cells(tmp_path, new_study) -> None:
    study = new_study(tmp_path / "two")
    for name in ("a", "b"):
        study.series("weak", "ddp", [2], batch=8, dataset=f"tokens:file=/data/{name}/corpus.bin")
    study.plan()
    assert len(set(frame_of([redacted(study)], "cells")["cell_id"])) == 2


def test_the_same_host_is_the_same_node_in_all_studies(
    tmp_path, new_study, new_timing, new_environment
) -> None:
    hosts = {"one": ["b7", "a3"], "two": ["a3"]}
    studies = []
    for name, named in hosts.items():
        study = new_study(tmp_path / name)
        cell = study.series("weak", "single", [1], batch=8)[0]
        study.plan()
        for host in named:
            study.run(cell, new_timing(step_ms=10, environment=new_environment(host=host)))
        studies.append(told(study))
    made = redactor(studies)
    assert [[run.hosts for run in made.study(one).results] for one in studies] == [
        [("node-2",), ("node-1",)],
        [("node-1",)],
    ]


def test_words_of_a_call_and_of_a_model_that_failed_are_left_out(telling) -> None:
    plain = told(telling)
    words = {"command": ("matrix", "--out", "merger"), "unpredicted": {"py:mine:build": "no merger"}}
    plans = [msgspec.structs.replace(plan, **words) for plan in plain.plans]
    hidden = redactor([plain]).study(dataclasses.replace(plain, plans=plans))
    assert "merger" not in whole(render_figures(analyse(hidden.name, hidden.plans, hidden.results)))
    assert all((plan.command, plan.unpredicted) == ((), {}) for plan in hidden.plans)


def test_the_same_study_is_redacted_to_the_same_bytes(telling) -> None:
    assert render_figures(redacted(telling)) == render_figures(redacted(telling))


def of(**known: list[str]) -> Redactor:
    return redactor([], **known)


HIDDEN = [
    ('rank 3: File "/opt/a b/x.py", line 3', 'rank 3: File "path-1", line 3'),
    ("wrote ~/x.log, ./y and ../z/w.", "wrote path-1, path-2 and path-3."),
    ("-I/home/u/include", "path-1"),
    ("runs/study/cells/a/rank-00000.json is damaged", "path-1 is damaged"),
    ("data/corpus.bin", "path-1"),
    (r"C:\Users\u\x.log", "path-1"),
    ("GPU018.example.org and gpu[001-004]", "node-2 and node-3"),
    ("node042:", "node042:"),
    ("fe80::1:2:3 and 10.0.0.1:29500", "address-1 and address-2:29500"),
    ("JOB 17 ON gpu017 CANCELLED", "job-1 ON node-1 CANCELLED"),
    ("a@b.org wrote to bob and Bob's bobby", "user-1 wrote to user-2 and Bob's bobby"),
]


@pytest.mark.parametrize(("given", "shown"), HIDDEN)
def test_what_is_hidden(given, shown) -> None:
    assert of(hosts=["gpu017.example.org"], users=["bob"]).text(given) == shown


SHOWN = [
    "1,234 images/s, 12 tokens/s/GPU, n/a, 1/2, a / b, 8 / 16",
    "forward/backward/update",
    "serial-simulation: 3 steps, all gradients within the bound",
    "pipeline:1f1b:microbatches=8 over topk:0.01",
    "2.13.0+cu126, driver 550.54.15",
    "2026-01-02T03:04:05.000Z 12:30:05",
    "20260102T030405Z-00000f",
    "the root cause: localhost",
    "gpt-nano-ddp-g002-b8-0123456789abcdef",
]


@pytest.mark.parametrize("given", SHOWN)
def test_text_without_names_is_left_as_it_is(given) -> None:
    assert of(hosts=["localhost", "gpu017"], users=["root"]).text(given) == given


def test_a_known_path_with_blanks_is_one() -> None:
    assert of(paths=["/my runs/one"]).text("in /my runs/one: nothing") == "in path-1: nothing"


def test_stand_ins_are_numbered_by_kind_in_the_order_of_the_texts() -> None:
    made = of()
    texts = ["/a/b", "job 7", "/c/d", "/a/b"]
    assert [made.text(one) for one in texts] == ["path-1", "job-1", "path-2", "path-1"]


@pytest.mark.parametrize(
    "token",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_0123456789abcdefghij",
        "sk-proj-0123456789ab",
    ],
)
def test_tokens_in_the_text_of_an_exception_are_redacted(token) -> None:
    told = redactor([]).text(
        f"401 Client Error: {token} may not read meta/llama; password=hunter2022 and Bearer {token}"
    )
    assert token not in told
    assert "hunter2022" not in told
    assert told.startswith("401 Client Error: secret-1 may not read")
    for plain in ("tokens/s/GPU is 120000", "token 50256 of the vocabulary", "sk-learn"):
        assert redactor([]).text(plain) == plain
