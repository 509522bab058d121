"""A catalog whose entries are declared by classes, each with all facts of one name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar, cast

from results.errors import SpecError
from results.extensions import Extension
from results.spec import Catalog, Entry, Option, Spec, require_options


class CatalogFacts:
    """Facts of one name of a catalog, known without running it; an instance belongs to one spec.

    A subclass declares the name; modules with such classes import no torch.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    positional: ClassVar[Option | None] = None
    options: ClassVar[Mapping[str, Option]] = MappingProxyType({})
    aliases: ClassVar[tuple[Entry, ...]] = ()
    """Other names, each for a spec text of this one."""
    places: ClassVar[tuple[str, ...]] = ()
    """Attributes that name code of a rank as `package.module:name`; None where the class has no such code."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @classmethod
    def missing(cls) -> list[str]:
        """Attributes and methods that a class of its kind must declare and this one lacks."""
        declared = {name for base in cls.__mro__ for name in vars(base).get("__annotations__", {})}
        methods = [name for name in dir(cls) if getattr(getattr(cls, name), "__isabstractmethod__", False)]
        return sorted([*(name for name in declared if not hasattr(cls, name)), *methods])

    @classmethod
    def entries(cls) -> Iterator[Entry]:
        """The lines of the catalog."""
        yield Entry(name=cls.name, help=cls.help, positional=cls.positional, options=cls.options)
        yield from cls.aliases


F = TypeVar("F", bound=CatalogFacts)


class Registry(Catalog, Generic[F]):
    """A catalog with the facts of each name."""

    def __init__(
        self,
        kind: str,
        known: Iterable[type[F]] | Mapping[str, str],
        *,
        base: type[F] | None = None,
        packaged: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`known`: classes, or their places by name and alias, which are imported when they are asked for.
        Other packages add classes derived from `base`. `packaged` as of `Catalog`."""
        super().__init__(kind, [], packaged=packaged)
        self._base = base or CatalogFacts
        self._known: dict[str, type[F] | str] = dict(known) if isinstance(known, Mapping) else {}
        for facts in () if isinstance(known, Mapping) else known:
            self.register(facts)

    @property
    def entries(self) -> dict[str, Entry]:
        return {entry.name: entry for facts in self.all_facts for entry in facts.entries()}

    @property
    def names(self) -> Collection[str]:
        return self._known

    def entry(self, name: str) -> Entry | None:
        if name not in self._known:
            return None
        return next(entry for entry in self._class(name).entries() if entry.name == name)

    def _class(self, name: str) -> type[F]:
        found = self._known[name]
        if isinstance(found, str):
            found = cast("type[F]", load(found))
            self._known |= dict.fromkeys((entry.name for entry in found.entries()), found)
        return found

    def register(self, facts: type[F]) -> None:
        """Add a name and its aliases after those that are there. Raises SpecError if one of them is taken."""
        names = [entry.name for entry in facts.entries()]
        for name in names:
            if name in self._known:
                raise SpecError(
                    f"{self.kind} {name!r} of {facts.__module__} exists already: give it another name"
                )
        self._known |= dict.fromkeys(names, facts)

    def admit(self, extension: Extension) -> None:
        facts: Any = extension.load()
        needed = f"a class derived from {self._base.__module__}.{self._base.__qualname__}"
        if not (isinstance(facts, type) and issubclass(facts, self._base)):
            raise extension.wrong(facts, needed)
        named = getattr(facts, "name", None)
        if named != extension.name:
            raise extension.wrong(facts, f"{needed} whose name is {extension.name!r}, not {named!r}")
        if missing := facts.missing():
            raise extension.wrong(facts, f"{needed} that declares {', '.join(missing)} too")
        with extension.told("has facts that fail"):
            self.require_sound(extension, facts)
        self.register(cast("type[F]", facts))

    def require_sound(self, extension: Extension, facts: type[CatalogFacts]) -> None:
        """Read all properties of the facts with the options at their defaults. Raises what is wrong."""
        for attribute in facts.places:
            if place := getattr(facts, attribute, None):
                extension.require_place(attribute, place)
        for entry in facts.entries():
            require_options(entry)
        entry = next(facts.entries())
        positional = entry.positional
        if positional is not None and positional.default is None and positional.example is None:
            return
        spec = self._build(entry, None if positional is None else positional.example, {})
        for name in dir(facts):
            if isinstance(getattr(facts, name), property):
                getattr(facts(spec), name)

    def forget(self, name: str) -> None:
        """Take a name and its aliases away again."""
        for entry in self._class(name).entries():
            del self._known[entry.name]
        self._parsed.clear()

    def facts(self, text: str) -> F:
        """The facts of what `text` names, with its options. Raises SpecError."""
        spec = self.parse(text)
        return self._class(spec.name)(spec)

    @property
    def all_facts(self) -> tuple[type[F], ...]:
        """The facts of all names, in the order of the catalog."""
        return tuple(dict.fromkeys(map(self._class, tuple(self._known))))

    def __contains__(self, name: str) -> bool:
        return name in self._known


def load(place: str) -> Any:
    """Import the object that `package.module:name` names, which may import torch."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
