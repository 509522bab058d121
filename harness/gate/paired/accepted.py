"""The tracked file that names the last accepted commit, and the changes since then that are meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from harness.gate.paired.sources import IncomparableError, Repository
from harness.terminal.console import Console
from reports.gate.comparison import Rules, Verdict
from reports.gate.metrics import EXACT, TIMED, read_share
from results.errors import UsageError, nearest
from results.strict_yaml import FileKind, Where


class Accepted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a paired comparison with the last accepted commit takes for right.

    With the previous commit in its place, a drift of 1 % a commit would never be reported.
    """

    commit: str
    changes: dict[str, str] = {}
    """Reason by metric, such as `payload_bytes: the second buffer is new`; `missing` for cells that are no
    longer planned."""
    fail_above: dict[str, str] = {}
    """The smallest change that matters by metric, such as `step_time: 3%`."""

    @property
    def margins(self) -> dict[str, float]:
        """Those of `fail_above`, as shares."""
        return {name: read_share(text, f"fail_above: {name}") for name, text in self.fail_above.items()}


def _check(accepted: Accepted, where: Where) -> None:
    """Raises UsageError for no commit, a change or margin of no metric, a change without a reason, or no
    percentage."""
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
        if name not in TIMED:
            raise UsageError(
                f"{where('fail_above')}: there is no metric {name!r}{nearest(name, TIMED)}; metrics with a "
                f"margin: {', '.join(TIMED)}"
            )
        read_share(text, f"{where('fail_above')}: {name} {text}")


ACCEPTED = FileKind(
    type=Accepted,
    name="file of the accepted commit",
    example="commit: 0123456789abcdef",
    advice="name a revision in place of BASE",
    check=_check,
)


def is_accepted_file(revision: str) -> bool:
    """Whether it names a file of the accepted commit, and no revision."""
    path = Path(revision)
    return path.suffix in (".yaml", ".yml") and path.is_file()


def resolve_base(revision: str, rules: Rules, repository: Repository, console: Console) -> tuple[str, Rules]:
    """The revision of BASE, and what is tolerated. For the file of the accepted commit: that commit, or else
    the last tag, and the changes and margins that the file states.

    Raises IncomparableError if this clone has neither the commit nor a tag.
    """
    if not is_accepted_file(revision):
        return revision, rules
    accepted = ACCEPTED.read(Path(revision))
    rules = replace(rules, accepted=accepted.changes, margins=accepted.margins | dict(rules.margins))
    try:
        return repository.commit(accepted.commit), rules
    except UsageError as error:
        tag = repository.last_tag()
        if tag is None:
            raise IncomparableError(f"{error}; {revision} names it, and there is no tag either") from error
        console.warn(f"{error}; {revision} names it: BASE is the last tag, {tag}")
        return tag, rules
