"""The id of a cell with each strategy, compressor, collective, optimizer, workload and option.

A change here orphans the runs of users' studies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from results.cell import Cell
from results.plan import StepPolicy
from results.spec import Catalog, Entry, Option
from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
from workloads.catalog import WORKLOADS
from workloads.datasets.facts import DATASETS

BASE: dict[str, Any] = {
    "workload": "gpt-nano",
    "dataset": "synthetic",
    "strategy": "ddp",
    "gpus": 8,
    "micro_batch": 16,
    "device": "cpu",
    "backend": "gloo",
    "optimizer": "adamw",
}
AXES: dict[str, Catalog] = {
    "workload": WORKLOADS,
    "dataset": DATASETS,
    "strategy": STRATEGIES,
    "compression": COMPRESSIONS,
    "collective": COLLECTIVES,
    "optimizer": OPTIMIZERS,
}
FIELDS: dict[str, Any] = {
    "device": "cuda",
    "backend": "nccl",
    "precision": "bf16",
    "accumulation": 4,
    "clip_norm": 1.0,
    "activation_checkpointing": True,
    "memory_limit_mb": 512,
    "compile": True,
    "memory_format": "channels_last",
    "seed": 3,
    "node_size": 4,
    "link_mbit_per_s": 100.0,
    "source_hash": "0123456789abcdef",
    "dataset_hash": "0123456789abcdef",
    "model_parallel": 2,
    "env": ("NCCL_ALGO=Ring",),
}
POSITIONAL = {
    "local-sgd": "4",
    "manual": "reshard.checkpoint*2+keep*2",
    "pipeline": "1f1b",
    "topk": "0.01",
    "randomk": "0.02",
    "powersgd": "4",
    "torch-powersgd": "2",
    "dgc": "0.001",
    "py": "mine:build",
    "text": "words.txt",
}


def _other(option: Option) -> str:
    """A value of an option that is not its default."""
    if option.kind == "bool":
        return "false" if option.default else "true"
    if option.choices:
        return next(choice for choice in reversed(option.choices) if choice != option.default)
    assert isinstance(option.default, int | float)
    most = option.default + 1 if option.maximum is None else option.maximum
    return str(min(option.default + 1, most) if option.default != most else option.minimum)


def _texts(catalog: Catalog) -> Iterator[str]:
    """Each name of a catalog, and each of its options with another value than the default."""
    for entry in catalog:
        name = entry.name
        if entry.positional is not None:
            name = f"{name}:{POSITIONAL[name]}"
        yield name
        yield from (f"{name}:{key}={_other(option)}" for key, option in _options(catalog, entry).items())


def _options(catalog: Catalog, entry: Entry) -> dict[str, Option]:
    named = entry if entry.alias_of is None else catalog.entries[entry.alias_of.partition(":")[0]]
    return dict(named.options)


def ids_by_axis() -> dict[str, dict[str, Any]]:
    """Map each typed text to its canonical text and the cell's id, and each other field to the id."""
    found: dict[str, dict[str, Any]] = {}
    for axis, catalog in AXES.items():
        found[axis] = {}
        for text in _texts(catalog):
            canonical = catalog.parse(text).text
            found[axis][text] = [canonical, Cell(**BASE | {axis: canonical}).id]
    found["field"] = {name: Cell(**BASE | {name: value}).id for name, value in FIELDS.items()}
    found["steps"] = {
        field.name: Cell(**BASE, steps=StepPolicy(**{field.name: field.default + 1})).id
        for field in msgspec.structs.fields(StepPolicy)
        if isinstance(field.default, int | float)
    }
    return found


def test_ids_and_canonical_texts_are_those_of_the_day_they_were_frozen(frozen) -> None:
    found = ids_by_axis()
    golden = frozen("ids.json", found)
    for axis, ids in golden.items():
        gone_or_changed = {
            text: at
            for text, at in ids.items()
            # The tests of a package have the ids of its names.
            if found[axis].get(text) != at and text.partition(":")[0] not in AXES[axis].absent
        }
        assert gone_or_changed == {}, axis


@pytest.mark.parametrize("axis", [*AXES, "field", "steps"])
def test_every_name_and_option_is_frozen(frozen, axis) -> None:
    found = ids_by_axis()
    golden = frozen("ids.json", found)
    new = {text: at for text, at in found[axis].items() if text not in golden[axis]}
    assert new == {}, "add these lines to tests/frozen/ids.json"


def test_every_field_of_a_cell_is_frozen() -> None:
    named = {*BASE, *FIELDS, *AXES, "steps"}
    assert set(Cell.__struct_fields__) == named
