"""The tracked file that names the last accepted commit, and the changes since then that are meant."""

from __future__ import annotations

import msgspec

from reports.gate.metrics import EXACT, TIMED
from results.errors import UsageError, nearest
from results.strict_yaml import FileKind, Where


class Accepted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a paired comparison with the last accepted commit takes for right.

    With the previous commit in its place, a drift of 1 % a commit would never be reported.
    """

    commit: str
    changes: dict[str, str] = {}
    """Reason by metric, such as `payload_bytes: the second buffer is new`."""


def _check(accepted: Accepted, where: Where) -> None:
    """Raises UsageError for a change of no metric, or one without its reason."""
    known = (*EXACT, *TIMED)
    for name, reason in accepted.changes.items():
        if name not in known:
            raise UsageError(
                f"{where('changes')}: there is no metric {name!r}{nearest(name, known)}; metrics are "
                f"{', '.join(known)}"
            )
        if not reason.strip():
            raise UsageError(f"{where('changes')}: {name} has no reason: say why the change is meant")


ACCEPTED = FileKind(
    type=Accepted,
    name="file of the accepted commit",
    example="commit: 0123456789abcdef",
    advice="name a revision in place of BASE",
    check=_check,
)
