"""Manifests are handed to kubectl. A script replaces kubectl, which needs a cluster to talk to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.features.kubernetes.launcher import KubectlError, apply

MANIFEST = "kind: Job\nname: \u00e4\n"


@pytest.fixture
def kubectl(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Replaces kubectl by a shell script; no other one can be found."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(script: str) -> None:
        path = tmp_path / "kubectl"
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        path.chmod(0o755)

    return put


def test_the_manifest_goes_to_kubectl(tmp_path, kubectl) -> None:
    printed = "echo service/x created; echo job/x created"
    kubectl(f'echo "$*" > {tmp_path}/arguments; cat > {tmp_path}/input; {printed}')
    assert apply(MANIFEST) == ("service/x created", "job/x created")
    assert (tmp_path / "arguments").read_text() == "apply -f -\n"
    assert (tmp_path / "input").read_text(encoding="utf-8") == MANIFEST


def test_kubectls_own_words_are_told(kubectl) -> None:
    kubectl("cat > /dev/null; echo 'error: no context' >&2; echo ' is set' >&2; exit 3")
    with pytest.raises(KubectlError) as caught:
        apply(MANIFEST)
    assert str(caught.value) == "kubectl apply -f - ended with 3: error: no context is set"


def test_a_kubectl_that_says_nothing(kubectl) -> None:
    kubectl("exit 1")
    with pytest.raises(KubectlError, match="ended with 1: it said nothing"):
        apply(MANIFEST)


def test_a_kubectl_that_does_not_answer(kubectl) -> None:
    kubectl("exec sleep 60")
    with pytest.raises(KubectlError, match=r"no answer in 0\.2 s to: kubectl apply -f -"):
        apply(MANIFEST, timeout_s=0.2)


@pytest.mark.usefixtures("kubectl")
def test_no_kubectl() -> None:
    with pytest.raises(KubectlError, match="kubectl is not installed here"):
        apply(MANIFEST)
