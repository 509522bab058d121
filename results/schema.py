"""Versioned JSON: every file names its schema and version.

Each schema has its own integer, its history in results/schemas.py, and one golden file a version under
tests/results/golden/. A file that is newer than the program is refused with advice.

A change needs a new version where an older program would misread the file or call it damaged: a field goes,
is renamed, or changes its type or meaning; a type gets a value that it did not have; or a type that forbids
unknown fields gets a field. A version whose new fields all have defaults that mean what was done before needs
no upgrade; any other has an upgrade function.

A new optional field needs no new version if its default means what was done before and an older program may
ignore the field: it gets a line without a number in the history, and a place in the newest golden file.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from results import files
from results.errors import NewerSchemaError, SchemaError, StoreError
from results.files import Content, DamagedError
from results.version import VERSION

T = TypeVar("T")
Json = dict[str, Any]
WRITER = f"bench {VERSION}"
_NOT_A_FILE = (errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENXIO)
"""Errors of `files.read` for a path that is not a regular file."""
_JSON = msgspec.json.Decoder(dict[str, Any])
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
MOST_INTEGER = 2**62
"""Largest integer in a measured record: two of them add up to 64 bits. In nanoseconds it is 146 years."""


class _Envelope(msgspec.Struct):
    schema: str
    schema_version: Annotated[int, msgspec.Meta(ge=1)]


_ENVELOPE = msgspec.json.Decoder(_Envelope)


@dataclass(frozen=True)
class Schema(Generic[T]):
    """The reader and writer of one kind of file."""

    name: str
    version: int
    type: type[T]
    upgrades: dict[int, Callable[[Json], Json]] = field(default_factory=dict)
    """Functions from version k to k + 1, by k; a version that is not listed needs no change."""
    advice: str = "move it away and run the same command again"
    """Advice on a damaged file."""
    measured: bool = False
    """Whether its integers are all measured or counted, and thus below `MOST_INTEGER`."""

    @cached_property
    def _begins(self) -> bytes:
        """How `encode` begins: files that begin so are parsed once."""
        return b'{"schema":"bench/%s","schema_version":%d,"' % (self.name.encode(), self.version)

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[T]:
        return msgspec.json.Decoder(self.type)

    def encode(self, value: T) -> bytes:
        """One JSON document with the envelope first.

        The document is decoded again before it is returned. JSON writes NaN and infinity as null, so they are
        refused in fields in which null does not mean unknown.
        """
        head = msgspec.json.encode(
            {"schema": f"bench/{self.name}", "schema_version": self.version, "writer": WRITER}
        )
        body = msgspec.json.encode(value)
        self._decoder.decode(body)
        return head[:-1] + b"," + body[1:] + b"\n"

    def decode(self, content: Content) -> T:
        """The value in a file or a line. Raises SchemaError naming its place and the field that is wrong."""
        data = content.data
        try:
            version = self.version if data.startswith(self._begins) else self._version(content)
            # Much faster than a regular expression.
            if self.measured and b"0" * 19 in data.translate(_DIGITS):
                _require_integers(content.parsed(_JSON))
            if version == self.version:
                return content.parsed(self._decoder)
            return msgspec.convert(self._upgraded(content.parsed(_JSON), version), self.type)
        except (DamagedError, msgspec.ValidationError) as error:
            raise SchemaError(
                f"{content.place} is not a readable {self.name}: {error}; it was damaged or edited: "
                f"{self.advice}"
            ) from error

    def _upgraded(self, value: Json, version: int) -> Json:
        """The value of an older version as the current one has it."""
        for step in range(version, self.version):
            try:
                value = self.upgrades[step](value) if step in self.upgrades else value
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                # An upgrade reads a value whose type nothing has checked.
                raise DamagedError(f"it lacks what version {step} has ({error!r})") from error
        return value

    def read(self, path: Path | str) -> T:
        try:
            return self.decode(files.read(path))
        except IsADirectoryError as error:
            raise SchemaError(f"{path} is a folder, not a {self.name}: move it away") from error
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise SchemaError(
                    f"{path} is not a readable {self.name}: {error.strerror}; move it away"
                ) from error
            raise StoreError(f"cannot read {path}: {error.strerror}") from error

    def _version(self, content: Content) -> int:
        envelope = content.parsed(_ENVELOPE)
        if envelope.schema != f"bench/{self.name}":
            raise SchemaError(f"{content.place} holds a {envelope.schema}, not a bench/{self.name}")
        if envelope.schema_version > self.version:
            raise NewerSchemaError(
                f"{content.place} is {self.name} version {envelope.schema_version}; this program knows up to "
                f"{self.version}: update bench to read it"
            )
        return envelope.schema_version


def _require_integers(value: object) -> None:
    """Raises ValidationError for an integer that cannot have been measured, at any depth."""
    if isinstance(value, int) and abs(value) >= MOST_INTEGER:
        raise msgspec.ValidationError(f"the integer {str(value)[:20]}... is too large to have been measured")
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _require_integers(one)
