"""Which code measures: a hash over what runs inside the measured process, and git's view of the checkout.

A cell may use code of other packages: names that they add by entry points, with version and source.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import msgspec

from results import files
from results.cell import Cell
from results.environment import CodeVersion
from results.errors import MachineError
from results.extensions import extensions
from results.features import home_of_kind
from results.plan import Order, Plan
from results.spec import split
from results.version import VERSION

PACKAGES = ("results", "workloads", "strategies", "slurm", "reports", "harness")
_MEASURED = (
    *("results", "workloads", "strategies"),
    *("harness/worker", "harness/machine/device.py", "harness/machine/kernel.py"),
    # The network between virtual nodes is measured with them.
    "harness/launch/virtual_network.py",
)


def checkout() -> Path:
    """The folder that holds the packages. Raises MachineError if they come from more than one.

    Their names are generic, so another distribution's `reports` could shadow ours.
    """
    folders: dict[Path, str] = {}
    for name in PACKAGES:
        file = importlib.import_module(name).__file__
        assert file is not None, name
        folders.setdefault(Path(file).resolve().parent.parent, name)
    if len(folders) > 1:
        places = "; ".join(f"{name} from {folder}" for folder, name in folders.items())
        raise MachineError(
            f"the packages of bench come from different folders ({places}): another package hides one of "
            f"them; install bench in a separate environment, or run it from another folder"
        )
    return next(iter(folders))


def code_version(source: Path | None = None) -> CodeVersion:
    """The version of the running code, and of the user's code in the folder `source` (default: the working
    folder). BENCH_COMMIT names the commit of the user's code outside of a repository."""
    folder = checkout()
    user_commit, user_dirty = os.environ.get("BENCH_COMMIT") or None, None
    if user_commit is None:
        # HEAD of the repository around the user's code.
        place = (source or Path.cwd()).resolve()
        root = next((one for one in (place, *place.parents) if (one / ".git").exists()), place)
        user_commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
        user_dirty = None if changed is None else bool(changed)
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return CodeVersion(
        code_hash=code_hash(folder),
        commit=_git(folder, "rev-parse", "HEAD") or _installed_commit(folder),
        dirty=None if status is None else bool(status),
        user_commit=user_commit,
        user_dirty=user_dirty,
    )


def code_hash(folder: Path, parts: Collection[str] = _MEASURED) -> str:
    """16 hex digits over everything that runs inside the measured process, as `what_runs` reads it."""
    digest = hashlib.sha256()
    for part in parts:
        place = folder / part
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(what_runs(files.read(path).data))
    return digest.hexdigest()[:16]


_TOKEN = re.compile(
    rb"""
    (?P<string> [rRbBuUfF]{0,2} (?:
        \"{3} (?:\\.|[^\\])*? \"{3} | '{3} (?:\\.|[^\\])*? '{3} | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    ))
    | (?P<comment> \#[^\n]*) | (?P<open> [(\[{]) | (?P<close> [)\]}])
    """,
    re.VERBOSE | re.DOTALL,
)
_REST_OF_LINE = re.compile(rb"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_LINE_BREAKS = re.compile(rb"[ \t]*\n(?:[ \t]*\n)*")


def what_runs(source: bytes) -> bytes:
    """Python source without comments, blank lines and strings that stand alone (docstrings).

    The code, in which each string is a NUL, and after it the strings, with a NUL between all of them. Not a
    dump of the syntax tree: a dump differs between versions of Python, and a host compares its hash with a
    container's; and to parse all files takes half a second.
    """
    code, strings, end, depth = [], [], 0, 0
    for token in _TOKEN.finditer(source):
        code.append(source[end : token.start()])
        end, kind = token.end(), token.lastgroup
        depth += (kind == "open") - (kind == "close")
        if kind in ("open", "close"):
            code.append(token[0])
        elif kind == "string":
            before = source[source.rfind(b"\n", 0, token.start()) + 1 : token.start()]
            stands_alone = not before.strip() and _REST_OF_LINE.match(source, end) is not None
            if depth or not stands_alone:
                code.append(b"\0")
                strings.append(token[0])
    code.append(source[end:])
    return b"\0".join([_LINE_BREAKS.sub(b"\n", b"".join(code)).strip(b"\n"), *strings])


def _installed_commit(folder: Path) -> str | None:
    """The commit that pip took the package from (direct_url.json of PEP 610), else BENCH_COMMIT, which the
    build of an image sets."""
    with suppress(metadata.PackageNotFoundError, ValueError, KeyError):
        installed = metadata.distribution("bench")
        if Path(str(installed.locate_file(""))).resolve() == folder:
            return str(json.loads(installed.read_text("direct_url.json") or "{}")["vcs_info"]["commit_id"])
    return os.environ.get("BENCH_COMMIT") or None


def git_user() -> str:
    """Return the name of the user in git's configuration; empty without one."""
    return _printed("git", "config", "user.name") or ""


def _git(folder: Path, *arguments: str) -> str | None:
    return _printed("git", "-C", str(folder), *arguments) if (folder / ".git").exists() else None


def _printed(*command: str) -> str | None:
    """Return what a command prints; None if it cannot be run, or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def packages_of(cells: Collection[Cell], *orders: Order | None) -> dict[str, str]:
    """`PACKAGE VERSION HASH` by `strategy gossip`: each name in these cells that another package adds, and
    each kind of these orders; of the engine of one of bench's own strategies `PACKAGE VERSION`.

    None of it is imported. Raises ExtensionError for an entry point whose module is not there.
    """
    # Imported here: an agent of a node asks this module only for the checkout.
    from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES
    from workloads.catalog import WORKLOADS

    texts = (
        (STRATEGIES, {cell.strategy for cell in cells}),
        (COMPRESSIONS, {cell.compression for cell in cells}),
        (COLLECTIVES, {cell.collective for cell in cells}),
        (WORKLOADS, {cell.workload for cell in cells}),
    )
    found = {
        f"{catalog.kind} {name}": catalog.offered[name].code
        for catalog, named in texts
        for name in sorted({split(text)[0] for text in named})
        if name in catalog.offered and not catalog.offered[name].own
    }
    found |= _codes_of_kinds({order.kind for order in orders if order is not None})
    named = {split(cell.strategy)[0] for cell in cells}
    for facts in STRATEGIES.all_facts:
        if facts.engine is not None and facts.name in named:
            # The hash of an extension covers the release that it states, and is known before its import.
            found.setdefault(f"{STRATEGIES.kind} {facts.name}", facts.engine.code)
    return found


def _codes_of_kinds(names: Collection[str]) -> dict[str, str]:
    kinds, found = extensions("kind"), {}
    for name in sorted(names):
        if name in kinds:
            found[f"kind {name}"] = kinds[name].code
        elif (home := home_of_kind(name)) is not None:
            found[f"kind {name}"] = f"bench {VERSION} {code_hash(checkout(), (home,))}"
    return found


def with_packages(code: CodeVersion, cells: Collection[Cell], *orders: Order | None) -> CodeVersion:
    """Return the version of the code with the versions of the other packages that these cells and orders
    use."""
    return msgspec.structs.replace(code, extensions=packages_of(cells, *orders) or msgspec.UNSET)


def planned_code(plans: Sequence[Plan]) -> CodeVersion:
    """The version of the code that would run the cells of these plans now.

    The user's commit is the commit of the folder from which the plans read the user's files, else of the
    working folder.
    """
    folders = (plan.request.source_folder for plan in plans)
    folder = next((Path(folder) for folder in folders if folder is not None), None)
    cells = [cell for plan in plans for cell in plan.cells]
    return with_packages(code_version(folder), cells, *(plan.order for plan in plans))


def require_planned_packages(code: CodeVersion, cells: Collection[Cell], *orders: Order | None) -> None:
    """Raises MachineError if these cells would run other code of other packages than was planned."""
    for name, found in packages_of(cells, *orders).items():
        planned = code.packages.get(name, "not installed")
        if found != planned:
            raise MachineError(
                f"the package of {name} was changed after this launch was planned ({planned} then, {found} "
                f"now): run the same command again"
            )
