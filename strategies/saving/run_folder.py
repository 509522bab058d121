"""The folder of a run's checkpoints: which are complete, which is next, and which to remove; without torch.

A checkpoint is a folder `step-000000200` with a `checkpoint.json` in it. It is written as `.step-...tmp` in
the same folder and renamed when it is complete on the disk, so that a kill at any moment leaves no incomplete
checkpoint under its name.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from results.checkpoint import Checkpoint, FileSum
from results.errors import SchemaError, StoreError, UsageError
from results.files import sync_folder, write_once
from results.schemas import CHECKPOINT

MANIFEST = "checkpoint.json"
METADATA = ".metadata"
"""The index of the files, of torch.distributed.checkpoint."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint in the folder."""

    path: Path
    manifest: Checkpoint


class RunFolder:
    """The checkpoints of one run. Only rank 0 changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def place(self, step: int) -> Path:
        return self.path / f"step-{step:09d}"

    def kept(self) -> list[Kept]:
        """Return the checkpoints with a manifest that can be read, by step."""
        found = []
        for path in sorted(self.path.glob("step-*")):
            try:
                found.append(self.read(path))
            except (SchemaError, StoreError):
                continue
        return found

    def read(self, path: Path) -> Kept:
        """Read the manifest of a checkpoint. Raises SchemaError if it is damaged, newer, or of another step
        than its folder, and StoreError if it cannot be read."""
        manifest = CHECKPOINT.read(path / MANIFEST)
        if re.fullmatch(r"step-\d+", path.name) and path.name != self.place(manifest.step).name:
            raise SchemaError(f"{path / MANIFEST} is of step {manifest.step}: it was copied or edited")
        return Kept(path, manifest)

    def begin(self, step: int, session: str, allowed: Collection[tuple[int, str]]) -> Path:
        """Create an empty folder for a checkpoint under way.

        `allowed` are the steps and sessions of checkpoints that this trainer wrote or resumed from. Raises
        UsageError if the newest one is another, or if there is one of this step: no checkpoint is
        overwritten.
        """
        newest = next((kept.manifest for kept in reversed(self.kept())), None)
        if newest is not None and (newest.step, newest.session) not in allowed:
            raise UsageError(
                f"{self.path} has a checkpoint of step {newest.step} that this run neither wrote nor resumed "
                f"from: resume({str(self.path)!r}) to train on from it, stop the other run, or save elsewhere"
            )
        if self.place(step).exists():
            raise UsageError(
                f"{self.place(step)} exists and is never overwritten: move it away, or save elsewhere"
            )
        temporary = self.path / f".step-{step:09d}.{session}.{secrets.token_hex(4)}.tmp"
        try:
            new = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            temporary.mkdir(parents=True)
            for folder in new:
                sync_folder(folder.parent)
        except OSError as error:
            raise StoreError(f"cannot make {temporary}: {error.strerror}; {advice(self.path)}") from error
        return temporary

    def set_aside(self, torn: Collection[Path]) -> None:
        """Rename torn checkpoints of this folder: they stay for inspection, and no longer count as
        checkpoints."""
        for path in torn:
            if path.exists():
                path.rename(path.with_name(f"torn-{path.name}.{secrets.token_hex(4)}"))

    def finish(self, temporary: Path, manifest: Checkpoint) -> Path:
        """Make the folder under way a checkpoint: write its manifest, then rename it."""
        path = self.place(manifest.step)
        write_once(temporary / MANIFEST, CHECKPOINT.encode(manifest))
        sync_folder(temporary)
        try:
            temporary.rename(path)
        except OSError as error:
            raise StoreError(f"cannot rename {temporary} to {path}: {error.strerror}") from error
        sync_folder(self.path)
        return path

    def forget(self, keep: int | None) -> None:
        """Remove unfinished checkpoints, and all except the last `keep` and the one with the best metric."""
        for path in self.path.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)
        if keep is None:
            return
        kept = self.kept()
        best = best_of(kept)
        for old in kept[:-keep]:
            if old is not best:
                # Rename it first: a kill in the middle leaves no incomplete checkpoint under its name.
                going = old.path.with_name(f".{old.path.name}.{secrets.token_hex(4)}.tmp")
                old.path.rename(going)
                shutil.rmtree(going, ignore_errors=True)


def best_of(kept: Collection[Kept]) -> Kept | None:
    """Return the checkpoint with the least metric, the later of equal ones, among checkpoints whose metric
    has the same name as the newest metric; None without a metric."""
    measured = [
        (metric, -each.manifest.step, each) for each in kept if (metric := each.manifest.metric) is not None
    ]
    if not measured:
        return None
    newest = min(measured, key=lambda found: found[1])[2]
    like = [found for found in measured if found[2].manifest.metric_name == newest.manifest.metric_name]
    return min(like, key=lambda found: found[:2])[2]


def sum_of(path: Path) -> FileSum:
    """Return the size and hash of a file as it can be read now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileSum(bytes=path.stat().st_size, sha256=digest)


def torn(path: Path, files: Mapping[str, FileSum], names: Collection[str]) -> str | None:
    """Describe the first damage of the named files of a checkpoint; None if they are intact."""
    for name in names:
        # A name must be a file of this folder, even in a manifest of another program.
        if Path(name).name != name:
            return f"{name} is not a file of a checkpoint"
        try:
            found = sum_of(path / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != files[name]:
            return f"{name} ({found.bytes} bytes) is not what was written ({files[name].bytes} bytes)"
    return None


def advice(folder: Path) -> str:
    """Advice for a folder that cannot be written to."""
    try:
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    except OSError:
        return "check the folder"
    return f"{free / 2**30:.1f} GiB are free there: free some space, or save to another folder"
