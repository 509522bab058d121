"""The code of the two sides: a revision of the repository in a separate folder, or the working tree.

A revision is checked out in a repository that borrows the objects of the user's (`objects/info/alternates`,
gitrepository-layout(5)). Unlike `git worktree`, this writes nothing in the user's repository, so nothing can
be left behind in it. It also works in a shallow clone, as long as the commit itself is there.

BASE may be a tracked file that names the last accepted commit, and the intended changes since then.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from harness.features.gate.comparison import Rules
from harness.features.gate.effect import Verdict
from harness.features.gate.metrics import EXACT, TIMED, read_share, require_timed
from harness.terminal.console import Console
from harness.worker.turns import PROTOCOL
from results import files
from results.errors import UsageError, nearest
from results.strict_yaml import FileKind, Where

WORKING_TREE = "."
"""The word for the working tree as it is, instead of a revision."""
IMPORT_S = 120.0
"""Time limit for the import of a side's `bench`."""
# `harness.worker.turns` and `harness.matrix` are at these places in all revisions.
_PROBE = (
    "from harness.worker import turns; import harness.matrix; "
    "print(turns.PROTOCOL, int(getattr(turns, 'FORKS', False)))"
)
_WITHOUT = ("cannot import name 'turns' from 'harness.worker'", "No module named 'harness.worker'")


class IncomparableError(Exception):
    """A side cannot take turns: it is older than the protocol, or has another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The code of one side."""

    name: str
    """BASE or NEW, for messages."""
    revision: str
    commit: str | None
    folder: Path
    """The folder in which its `bench` is called: the user's working folder, in its tree."""
    tree: Path
    python: str
    files: str | None = None
    """A hash of the working tree's files when the comparison began; None for a commit."""
    import_path: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Options of its `bench matrix`."""

    def environment(self) -> dict[str, str]:
        """Variables with which Python finds the `bench` of this side's tree, else the installed one."""
        own = [str(self.tree)] if (self.tree / "harness" / "worker").is_dir() else []
        path = os.pathsep.join([*own, *self.import_path])
        return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}

    def require_protocol(self) -> bool:
        """Whether its `bench` forks the runs of a launch.

        Raises IncomparableError if it takes no turns as this one does, UsageError if it fails.
        """
        try:
            done = subprocess.run(
                [self.python, "-c", _PROBE],
                cwd=self.folder,
                env=self.environment(),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=IMPORT_S,
            )
        except OSError as error:
            raise UsageError(f"{self}: cannot start {self.python}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise UsageError(f"{self} was not imported by {self.python} within {IMPORT_S:.0f} s") from error
        told = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        if done.returncode and any(words in told for words in _WITHOUT):
            raise IncomparableError(
                f"{self} is older than the paired mode, its ranks take no turns: name a newer revision"
            )
        if done.returncode:
            raise UsageError(
                f"{self} cannot be imported by {self.python} ({told}): name a revision that can, or an "
                f"interpreter that has its packages (--{self.name.lower()}-python)"
            )
        words = done.stdout.split()
        if len(words) != 2:
            raise UsageError(
                f"{self}: {self.python} is not a Python interpreter (--{self.name.lower()}-python)"
            )
        protocol, forks = words
        if protocol != str(PROTOCOL):
            raise IncomparableError(
                f"{self} takes turns by protocol {protocol}, this bench by protocol {PROTOCOL}"
            )
        return forks == "1"

    def require_unedited(self) -> None:
        """Raises UsageError if the working tree is another one than when the comparison began."""
        if self.files is not None and Repository(self.folder).files_hash() != self.files:
            raise UsageError(
                f"files in {self.tree} were edited while they were compared: begin a new comparison, or "
                f"compare commits"
            )

    def __str__(self) -> str:
        short = "the working tree" if self.commit is None else self.commit[:12]
        return f"{self.name} ({self.revision}, {short})"


class Repository:
    """The repository around the working folder, read only."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError if no repository is there."""
        self._folder = folder
        try:
            self.root = Path(self._git("rev-parse", "--show-toplevel"))
        except OSError as error:
            raise UsageError(f"--ab needs git: {error.strerror}; install it") from error
        except subprocess.CalledProcessError as error:
            raise UsageError(
                f"{folder} is in no git repository ({_last_line(error.stderr)}): call bench compare --ab "
                f"where the code under test is"
            ) from error

    def commit(self, revision: str) -> str:
        """The commit of a revision. Raises UsageError if the repository lacks it."""
        try:
            return self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        except subprocess.CalledProcessError as error:
            fetch = ""
            if self._git("rev-parse", "--is-shallow-repository") == "true":
                fetch = f"; the clone is shallow: git fetch --depth=1 origin {revision}"
            hint = fetch or "; git branch --all and git tag list the revisions"
            raise UsageError(f"there is no revision {revision} in {self.root}{hint}") from error

    def last_tag(self) -> str | None:
        """The newest tag among the ancestors of HEAD; None without one."""
        try:
            return self._git("describe", "--tags", "--abbrev=0")
        except subprocess.CalledProcessError:
            return None

    def require_committed(self, revisions: Mapping[str, str]) -> None:
        """Raises UsageError if one of these is HEAD and the working tree has changes that it lacks.

        `revisions`: commit by revision as it was given.
        """
        head = self.commit("HEAD")
        changed = self._git("status", "--porcelain", "--untracked-files=no")
        for revision, commit in revisions.items():
            if changed and commit == head:
                file = changed.split(maxsplit=1)[1].splitlines()[0]
                raise UsageError(
                    f"{self.root} has changes that {revision} lacks, such as in {file}: commit them, or give "
                    f"{WORKING_TREE} instead of {revision} to measure the tree as it is"
                )

    def files_hash(self) -> str:
        """16 hex digits over the tracked files of the working tree, and over its Python and YAML files.

        The hash does not change when files are staged or committed. A submodule counts by its commit.
        """
        staged = self._names("ls-files", "--stage")
        blobs = {name: words.split()[1] for words, _, name in (line.partition("\t") for line in staged)}
        edited = self._names("diff", "--name-only")
        untracked = self._names("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.yaml", "*.yml")
        for name in edited:
            blobs.pop(name, None)
        kind = self._git("rev-parse", "--show-object-format")
        for name in (*edited, *untracked):
            path = self.root / name
            if path.is_symlink() or path.is_file():
                data = os.fsencode(path.readlink()) if path.is_symlink() else files.read(path).data
                # This is the id of git's blob of the file, if no filter changes what is committed.
                blobs[name] = hashlib.new(kind, b"blob %d\0" % len(data) + data).hexdigest()
        whole = "\0".join(f"{name}\0{blobs[name]}" for name in sorted(blobs))
        return hashlib.sha256(whole.encode(errors="surrogateescape")).hexdigest()[:16]

    def _names(self, command: str, *arguments: str) -> list[str]:
        """Names that git lists in the complete working tree."""
        return self._git("-C", str(self.root), command, "-z", *arguments).split("\0")[:-1]

    def source(
        self, name: str, revision: str, python: str | None, under: Path, options: tuple[str, ...] = ()
    ) -> Source:
        """A side's code; a revision is checked out below `under`. Raises UsageError if that fails."""
        python = sys.executable if python is None else python
        commit = None if revision == WORKING_TREE else self.commit(revision)
        tree, folder = self.root, self._folder
        if commit is not None:
            tree = self._checked_out(commit, under / f"{name.lower()}-{commit[:12]}")
            place = self._folder.resolve().relative_to(self.root.resolve())
            folder = tree / place
            if not folder.is_dir():
                raise UsageError(
                    f"{revision} has no folder {place}: call bench compare from one that both have"
                )
        return Source(
            name=name,
            revision=revision,
            commit=commit,
            folder=folder,
            tree=tree,
            python=python,
            import_path=self._import_path(tree),
            files=self.files_hash() if commit is None else None,
            options=options,
        )

    def _checked_out(self, commit: str, tree: Path) -> Path:
        """The folder `tree`, in which a commit is checked out. Raises UsageError if that fails."""
        if not tree.is_dir():
            kind = self._git("rev-parse", "--show-object-format")
            objects = (self._folder / self._git("rev-parse", "--git-path", "objects")).resolve()
            try:
                self._git("init", "--quiet", "--template=", f"--object-format={kind}", str(tree))
                (tree / ".git" / "objects" / "info").mkdir(exist_ok=True)
                (tree / ".git" / "objects" / "info" / "alternates").write_text(f"{objects}\n")
                self._git("-C", str(tree), "checkout", "--quiet", "--detach", commit)
            except subprocess.CalledProcessError as error:
                raise UsageError(
                    f"commit {commit[:12]} cannot be checked out ({_last_line(error.stderr)}): run git fetch"
                ) from error
        return tree

    def _import_path(self, tree: Path) -> tuple[str, ...]:
        """PYTHONPATH of a side: its `tree` replaces the folders that git tracks in the working tree."""
        root, own = self.root.resolve(), list[str]()
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            place = Path(entry).resolve()
            is_of_tree = Path(entry).is_absolute() and place.is_relative_to(root)
            name = str(place.relative_to(root)) if is_of_tree else ""
            own.append(str(tree / name) if name and self._names("ls-files", "--", name) else entry)
        return tuple(entry for entry in own if entry)

    def _git(self, *arguments: str) -> str:
        # In a hook these name the user's repository, whatever folder git is called in.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        done = subprocess.run(
            ["git", *arguments],
            cwd=self._folder,
            # Without this variable `git diff` may write the index.
            env=variables | {"GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=True,
        )
        return done.stdout.rstrip("\n")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["git said nothing"])[-1]


class Accepted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes that a paired comparison with the last accepted commit accepts.

    A comparison with the previous commit instead would never report a drift of 1 % a commit.
    """

    commit: str
    changes: dict[str, str] = {}
    """Reason by metric, such as `payload_bytes: the second buffer is new`; `missing`: for missing cells."""
    fail_above: dict[str, str] = {}
    """The smallest change that matters by metric, such as `step_time: 3%`."""


def _check(accepted: Accepted, where: Where) -> None:
    """Raises UsageError for a commit, a metric, a reason or a percentage that is missing or wrong."""
    if not accepted.commit.strip():
        raise UsageError(f"{where('commit')}: it is empty; name the last accepted commit")
    known = (*EXACT, *TIMED, Verdict.MISSING)
    for name, reason in accepted.changes.items():
        if name not in known:
            raise UsageError(
                f"{where('changes')}: there is no metric {name!r}{nearest(name, known)}; metrics are "
                f"{', '.join(known)}"
            )
        if not reason.strip():
            raise UsageError(f"{where('changes')}: {name} has no reason: say why the change is meant")
    for name, text in accepted.fail_above.items():
        require_timed(name, f"{where('fail_above')}: there is")
        read_share(text, f"{where('fail_above')}: {name} {text}")


ACCEPTED = FileKind(
    type=Accepted,
    name="file of the accepted commit",
    example="commit: 0123456789abcdef",
    advice="name a revision instead of BASE",
    check=_check,
)


def is_accepted_file(revision: str) -> bool:
    """Whether it names a file of the accepted commit, and no revision."""
    path = Path(revision)
    return path.suffix in (".yaml", ".yml") and path.is_file()


def resolve_base(revision: str, rules: Rules, repository: Repository, console: Console) -> tuple[str, Rules]:
    """Return the revision of BASE, and the rules.

    The file of the accepted commit names that commit, and states accepted changes and margins. If this clone
    does not have the commit, BASE is the last tag.

    Raises IncomparableError if this clone has neither the commit nor a tag.
    """
    if not is_accepted_file(revision):
        return revision, rules
    accepted = ACCEPTED.read(Path(revision))
    own = {name: read_share(text, f"fail_above: {name}") for name, text in accepted.fail_above.items()}
    rules = replace(rules, accepted=accepted.changes, margins=own | dict(rules.margins))
    try:
        return repository.commit(accepted.commit), rules
    except UsageError as error:
        tag = repository.last_tag()
        if tag is None:
            raise IncomparableError(
                f"{error}: {revision} names that commit, and the repository has no tag to use as BASE"
            ) from error
        console.warn(f"{error}: {revision} names that commit, so the last tag {tag} is used as BASE")
        return tag, rules
