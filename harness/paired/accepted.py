"""The tracked file that names the last accepted commit, and the changes since then that are meant."""

from __future__ import annotations

import msgspec

from results.strict_yaml import FileKind


class Accepted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a paired comparison with the last accepted commit takes for right.

    With the previous commit in its place, a drift of 1 % a commit would never be reported.
    """

    commit: str
    changes: dict[str, str] = {}
    """Reason by metric, such as `payload_bytes: the second buffer is new`."""


ACCEPTED = FileKind(
    type=Accepted,
    name="file of the accepted commit",
    example="commit: 0123456789abcdef",
    advice="name a revision in place of BASE",
)
