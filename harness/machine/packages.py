"""Which code of other packages a cell uses: names that they add by entry points, with version and source."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from results.cell import Cell
from results.environment import CodeVersion
from results.errors import MachineError
from results.spec import split
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES
from workloads.catalog import WORKLOADS


def packages_of(cells: Collection[Cell]) -> dict[str, str]:
    """`PACKAGE VERSION HASH` by `strategy gossip`: each name in these cells that another package adds.

    None of it is imported. Raises ExtensionError for an entry point whose module is not there.
    """
    texts = (
        (STRATEGIES, {cell.strategy for cell in cells}),
        (COMPRESSIONS, {cell.compression for cell in cells}),
        (COLLECTIVES, {cell.collective for cell in cells}),
        (WORKLOADS, {cell.workload for cell in cells}),
    )
    return {
        f"{catalog.kind} {name}": catalog.offered[name].code
        for catalog, named in texts
        for name in sorted({split(text)[0] for text in named})
        if name in catalog.offered
    }


def with_packages(code: CodeVersion, cells: Collection[Cell]) -> CodeVersion:
    """The code with what these cells use of other packages."""
    return msgspec.structs.replace(code, extensions=packages_of(cells) or msgspec.UNSET)


def require_planned_packages(code: CodeVersion, cells: Collection[Cell]) -> None:
    """Raises MachineError if these cells would run other code of other packages than was planned."""
    for name, found in packages_of(cells).items():
        planned = code.packages.get(name, "not installed")
        if found != planned:
            raise MachineError(
                f"the package of {name} was changed after this launch was planned ({planned} then, {found} "
                f"now): run the same command again"
            )
