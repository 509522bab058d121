"""Which cell of NEW each cell of BASE is held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from reports.gate.reduce import subject_key
from results.cell import Cell
from results.errors import UsageError


def counterparts(base: Sequence[Cell], new: Sequence[Cell], *, same_options: bool) -> dict[str, str]:
    """The id of NEW's cell by that of BASE's, for the cells that both sides plan.

    Cells with the same subject key correspond. Where the sides have other options, so do, of the rest, those
    that agree in every field whose values are the same on both sides. A cell that is left has no counterpart:
    it is missing in NEW, or new there.

    Raises UsageError where the rest of a side does not tell its cells apart by these fields.
    """
    there, here = ({subject_key(cell): cell for cell in cells} for cells in (base, new))
    found = {cell.id: here[key].id for key, cell in there.items() if key in here}
    rest = [cell for key, cell in there.items() if key not in here]
    others = [cell for key, cell in here.items() if key not in there]
    if same_options or not rest or not others:
        return found
    names = [name for name in Cell.__struct_fields__ if _column(rest, name) == _column(others, name)]
    by_values = {_values(cell, names): cell.id for cell in others}
    if len(by_values) < len(others) or len({_values(cell, names) for cell in rest}) < len(rest):
        raise UsageError(
            f"it is not clear which cells of BASE, such as {rest[0].id}, are to be held against which of "
            f"NEW, such as {others[0].id}: compare one cell at a time"
        )
    values = {cell.id: _values(cell, names) for cell in rest}
    return found | {cell: by_values[its] for cell, its in values.items() if its in by_values}


def _column(cells: Sequence[Cell], name: str) -> Counter[bytes]:
    """How often a field has each of its values."""
    return Counter(value for cell in cells for value in _values(cell, [name]))


def _values(cell: Cell, names: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(msgspec.json.encode(getattr(cell, name), order="sorted") for name in names)
