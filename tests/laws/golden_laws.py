"""The laws of every schema: files of each version are read, and damaged ones refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from approval import approved

import results.schema
from results.errors import NewerSchemaError, SchemaError
from results.files import Content
from results.schema import Schema


def json_of(value: object) -> str:
    return msgspec.json.encode(value).decode()


class GoldenLaws:
    """Derive a test class from this, with some schemas and the folder of their golden files.

    The newest file of a schema has all fields. `golden_older.txt`, next to the folder, has a line with what
    each older file reads to, as JSON of today.
    """

    golden: ClassVar[Path]
    """The folder of the files, `NAME-VERSION.json`."""
    schemas: ClassVar[Sequence[Schema[Any]]]

    def file(self, schema: Schema[Any], version: int | None = None) -> Path:
        return self.golden / f"{schema.name}-{version or schema.version}.json"

    def test_each_version_of_each_schema_has_its_golden_file(self) -> None:
        files = {
            self.file(schema, version) for schema in self.schemas for version in range(1, schema.version + 1)
        }
        assert set(self.golden.iterdir()) == files

    def test_an_older_file_reads_to_what_was_approved(self) -> None:
        lines = [
            f"{schema.name}-{version} {json_of(schema.read(self.file(schema, version)))}\n"
            for schema in self.schemas
            for version in range(1, schema.version)
        ]
        if lines:
            approved(self.golden.with_name("golden_older.txt"), "".join(lines))

    def test_the_newest_version_is_written_byte_for_byte_as_it_is_read(self, monkeypatch) -> None:
        for schema in self.schemas:
            golden = self.file(schema).read_bytes()
            monkeypatch.setattr(results.schema, "WRITER", msgspec.json.decode(golden)["writer"])
            assert schema.encode(schema.read(self.file(schema))) == golden

    def test_a_golden_file_has_every_field(self) -> None:
        for schema in self.schemas:
            written = set(msgspec.json.decode(self.file(schema).read_bytes()))
            assert written == {*schema.type.__struct_fields__, "schema", "schema_version", "writer"}

    def test_a_newer_file_is_refused_with_advice(self, tmp_path) -> None:
        for schema in self.schemas:
            path = tmp_path / "file.json"
            path.write_text(
                f'{{"schema":"bench/{schema.name}","schema_version":{schema.version + 1},"unheard":[1]}}'
            )
            with pytest.raises(NewerSchemaError) as error:
                schema.read(path)
            assert str(error.value) == (
                f"{path} is {schema.name} version {schema.version + 1}; this program knows up to "
                f"{schema.version}: update bench to read it"
            )

    def test_a_file_that_was_cut_off_anywhere_is_refused(self) -> None:
        for schema in self.schemas:
            data = self.file(schema).read_bytes()
            for length in range(len(data) - 1):  # without its last byte, the newline, it is complete
                with pytest.raises(SchemaError):
                    schema.decode(Content(Path("file.json"), data[:length]))
