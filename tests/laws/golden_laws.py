"""The laws of every schema: files of each version are read, and damaged ones refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

import results.schema
from results.errors import NewerSchemaError, SchemaError
from results.files import Content
from results.schema import Schema


class GoldenLaws:
    """Derive a test class from this, with the golden files of some schemas and what each file reads to."""

    golden: ClassVar[Path]
    """The folder of the files, `NAME-VERSION.json`."""
    expected: ClassVar[Mapping[str, tuple[Schema[Any], Any]]]
    """The schema and the object of each file, by its stem; the newest versions have all fields."""

    def newest(self) -> list[tuple[Schema[Any], Any, Path]]:
        """Schema, object and file of the newest version of each."""
        return [
            (schema, value, self.golden / f"{stem}.json")
            for stem, (schema, value) in self.expected.items()
            if stem == f"{schema.name}-{schema.version}"
        ]

    def test_each_version_of_each_schema_has_its_golden_file(self) -> None:
        every = {schema.name: schema for schema, _ in self.expected.values()}
        stems = {
            f"{name}-{version}" for name, schema in every.items() for version in range(1, schema.version + 1)
        }
        assert {path.stem for path in self.golden.iterdir()} == stems == set(self.expected)

    def test_a_file_of_any_version_reads_to_the_expected_object(self) -> None:
        for stem, (schema, value) in self.expected.items():
            assert schema.read(self.golden / f"{stem}.json") == value, stem

    def test_the_newest_version_is_written_byte_for_byte(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for schema, value, file in self.newest():
            golden = file.read_bytes()
            monkeypatch.setattr(results.schema, "WRITER", msgspec.json.decode(golden)["writer"])
            assert schema.encode(value) == golden
            assert schema.encode(schema.read(file)) == golden

    def test_a_golden_file_has_every_field(self) -> None:
        for _, value, file in self.newest():
            written = set(msgspec.json.decode(file.read_bytes()))
            assert written == {*value.__struct_fields__, "schema", "schema_version", "writer"}

    def test_a_newer_file_is_refused_with_advice(self, tmp_path: Path) -> None:
        for schema, _, _ in self.newest():
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
        for schema, _, file in self.newest():
            data = file.read_bytes()
            for length in range(len(data) - 1):  # without its last byte, the newline, it is complete
                with pytest.raises(SchemaError):
                    schema.decode(Content(Path("file.json"), data[:length]))
