"""Handing manifests to a cluster, through kubectl and the cluster that it is set to."""

from __future__ import annotations

import subprocess

from results.errors import BenchError

TIMEOUT_S = 60.0
_COMMAND = ("kubectl", "apply", "-f", "-")


class KubectlError(BenchError):
    """kubectl could not be run, failed, or did not answer."""


def apply(manifest: str, *, timeout_s: float = TIMEOUT_S) -> tuple[str, ...]:
    """Make the objects of a manifest, or bring those that exist to what it says.

    Returns what kubectl says, a line an object. Raises KubectlError with kubectl's own words; when it has not
    answered in time, some of the objects may be there, and applying the same manifest again does no harm.
    """
    command = " ".join(_COMMAND)
    try:
        done = subprocess.run(
            _COMMAND, input=manifest.encode(), capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KubectlError(
            f"no answer in {timeout_s:g} s to: {command}; run it on the manifest again by hand"
        ) from error
    except FileNotFoundError as error:
        raise KubectlError(
            "there is no kubectl here: leave out --apply, and apply the manifest on a machine with one"
        ) from error
    except OSError as error:
        raise KubectlError(f"cannot run kubectl: {error.strerror}") from error
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split()) or "it said nothing"
        raise KubectlError(f"{command} ended with {done.returncode}: {said}")
    return tuple(done.stdout.decode(errors="replace").splitlines())
