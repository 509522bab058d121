"""The workload `program` and the strategy `program`, for the catalogues; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from harness.features.programs.file import ProgramFile, choice, refused
from results.cell import Cell, differing_fields
from results.errors import SpecError, UsageError
from results.groups import GroupLayout
from results.parts import ModelParts, Unknown
from results.spec import Option
from strategies.closed_form.terms import Term
from strategies.facts import StrategyFacts, quotient
from strategies.promise import Promise
from workloads.catalog import Member
from workloads.datasets.facts import Own
from workloads.shape import Shape, WorkloadFacts

known: dict[str, ProgramFile] = {}
"""The programs of this process, by the text of their workload: filled when a request is made."""


def not_built(*arguments: Any, **options: Any) -> NoReturn:
    """Stand in for a model. Raises SpecError."""
    raise SpecError("bench does not build the model of a program: bench program check FILE.yaml tries it")


@dataclass(frozen=True, kw_only=True)
class ProgramShape(Shape):
    """A program, of which planning knows no model."""

    @property
    def positional(self) -> Option:
        return Option(kind="str", help="FILE.yaml", example="train.yaml")

    def facts(self) -> WorkloadFacts:
        unknown: Any = Unknown("planning does not know what is in a foreign program")
        rest = ("unit", "units_per_sample", "parts", "heads", "batch_norm", "minimum_batch", "memory_formats")
        return WorkloadFacts(
            family="program",
            builder="harness.features.programs.facts:not_built",
            hashed_by="harness.features.programs.request:program_hash",
            **dict.fromkeys((*rest, "datasets"), unknown),
        )


PROGRAM_WORKLOAD = Member(
    name="program",
    help="a program that is not bench's: FILE.yaml says how it is started",
    shape=ProgramShape(),
    batch=8,
    optimizer="sgd:lr=0.01",
)
_DECIDED = {"optimizer": PROGRAM_WORKLOAD.optimizer, "dataset": Own.name} | dict.fromkeys(
    ("precision", "clip_norm", "activation_checkpointing", "compile", "memory_format")
)
"""Options of a cell that a program decides itself, each with its default; None: the schema's."""


class ProgramStrategy(StrategyFacts):
    """A strategy of a program's file, of which bench knows only the ranks of a replica."""

    name = "program"
    help = "a strategy of a program's file, which the program carries out"
    positional = Option(kind="str", help="the NAME of a strategy in the program's file", example="sharded")
    options = MappingProxyType(
        {"replica": Option(kind="int", default=1, minimum=1, help="ranks that hold one replica together")}
    )
    model = "harness.features.programs.facts:not_built"
    distributed = None
    fixed_exchange = "a program exchanges its gradients itself"
    promise = Promise(unproven="bench did not train it")

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        replica = self.spec.integer("replica")
        return GroupLayout(replicate=quotient(self.spec.text, ranks, replica), tensor=replica)

    def applies(self, workload: str) -> bool:
        """Whether the file has the strategy, with the same line."""
        file = known.get(workload)
        with suppress(UsageError):
            return file is None or choice(file, str(self.spec.positional)).text == self.spec.text
        return False

    def refusal(self, cell: Cell) -> str | None:
        if not cell.workload.startswith("program:"):
            return f"{self.spec.text} is a strategy of a program, and {cell.workload} is a model of bench"
        given = differing_fields(cell)
        for name in _DECIDED:
            if given.get(name, _DECIDED[name]) != _DECIDED[name]:
                option = f"--{name.replace('_', '-')}"
                return f"{cell.workload} decides {option} itself: make it a setting of the program's file"
        file = known.get(cell.workload)
        return None if file is None else refused(file, str(self.spec.positional), cell)

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        not_built()
