"""Names of other packages: listed from metadata, imported when asked for, refused with the package's name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from packages import first_on_the_path, install

from results.errors import ExtensionError, SpecError
from results.extensions import GROUPS, extensions, forget_packages, package_hash
from results.registry import CatalogFacts, Registry
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES
from strategies.compression.facts import CompressorFacts
from strategies.facts import StrategyFacts

GROUP = "bench.strategies"
FACTS = """
from results.registry import CatalogFacts

class Fast(CatalogFacts):
    name = "fast"
    help = "a strategy from elsewhere"
"""
Package = Callable[..., None]


class Builtin(CatalogFacts):
    name = "plain"
    help = "ours"


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[Package]:
    """Installs a package of one module, for one test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = set(sys.modules)

    def made(name: str, points: dict[str, str], module: str = FACTS, *, group: str = GROUP) -> None:
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(module)
        install(tmp_path, name, {group: points})
        forget_packages()

    yield made
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    forget_packages()


def registry() -> Registry[CatalogFacts]:
    return Registry("strategy", [Builtin])


def test_a_name_is_listed_and_not_imported(package) -> None:
    package("elsewhere", {"fast": "elsewhere:Fast"})
    # Whoever writes a package has it installed beside this one.
    known = registry().offered["fast"]
    assert (known.name, known.package, known.version) == ("fast", "elsewhere", "1.0")
    with pytest.raises(SpecError, match=r"did you mean 'fast'.*there are: .*\bfast, .*\bplain"):
        registry().parse("fest")
    assert "elsewhere" not in sys.modules


def test_a_name_of_a_known_package_is_refused_with_its_installation_until_it_is_there(package) -> None:
    def known() -> Registry[CatalogFacts]:
        return Registry("strategy", [Builtin], packaged={"fast": "pip install elsewhere"})

    predicate = "is in a package that is not installed; install it: pip install elsewhere"
    assert known().absent == {"fast": predicate}
    with pytest.raises(SpecError, match=f"^strategy 'fast' {predicate}$"):
        known().parse("fast:speed=3")
    with pytest.raises(SpecError, match=r"did you mean 'fast'\?\); there are: [^']*plain"):
        known().parse("fest")
    package("elsewhere", {"fast": "elsewhere:Fast"})
    assert known().absent == {}
    assert known().parse("fast").name == "fast"


def test_a_name_that_is_asked_for_is_imported_and_parsed(package) -> None:
    package("elsewhere", {"fast": "elsewhere:Fast"})
    known = registry()
    assert known.facts("fast").help == "a strategy from elsewhere"
    assert [entry.name for entry in known] == ["plain", "fast"]


def test_threads_that_name_it_at_once_register_it_once(package) -> None:
    package("elsewhere", {"fast": "elsewhere:Fast"}, f"import time\ntime.sleep(0.1)\n{FACTS}")
    known, together = registry(), Barrier(4)

    def named() -> str:
        together.wait()
        return known.parse("fast").text

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(named) for _ in range(4)]
    assert [future.result() for future in futures] == ["fast"] * 4


def test_a_package_that_cannot_be_imported_costs_its_own_name_alone(package) -> None:
    package("elsewhere", {"fast": "elsewhere:Fast"}, "import a_module_that_is_missing\n")
    known = registry()
    assert known.parse("plain").name == "plain"
    with pytest.raises(
        ExtensionError,
        match=r"strategy 'fast' of the package elsewhere 1\.0 cannot be imported from elsewhere:Fast: "
        r"ModuleNotFoundError: .*a_module_that_is_missing.*; repair the package, or uninstall it: "
        r"pip uninstall elsewhere",
    ):
        known.parse("fast")


def test_two_packages_of_one_name_are_both_named(package) -> None:
    package("elsewhere", {"fast": "elsewhere:Fast"})
    package("nowhere", {"fast": "nowhere:Fast"})
    with pytest.raises(ExtensionError, match="two packages have a strategy 'fast', elsewhere and nowhere"):
        extensions("strategy")
    assert "fast" not in extensions("workload")


def test_a_built_in_name_is_not_taken_over(package) -> None:
    package("elsewhere", {"plain": "elsewhere:Fast"})
    with pytest.raises(
        ExtensionError,
        match=r"strategy 'plain' of the package elsewhere 1\.0 has a name of bench's own: give it another "
        r"name, or uninstall the package: pip uninstall elsewhere",
    ):
        registry().parse("plain")


@pytest.mark.parametrize("place", ["elsewhere:CatalogFacts", "elsewhere", "elsewhere:Fast.name"])
def test_an_entry_point_that_is_not_a_strategy_is_refused(package, place) -> None:
    package("elsewhere", {"quick": place})
    with pytest.raises(ExtensionError, match=r"must be a class derived from results\.registry\.CatalogFacts"):
        registry().parse("quick")


@pytest.mark.parametrize(
    ("base", "missing"), [(StrategyFacts, "help, model, terms"), (CompressorFacts, "help, compressor")]
)
def test_facts_that_declare_too_little_are_refused(package, base, missing) -> None:
    module = f"from {base.__module__} import {base.__name__} as Base\nclass Fast(Base):\n    name = 'fast'\n"
    package("elsewhere", {"fast": "elsewhere:Fast"}, module)
    known = Registry("strategy", [], base=base)
    with pytest.raises(ExtensionError, match=rf"that declares {missing} too: repair the package"):
        known.parse("fast")


MISTAKES = {
    "options = {'every': 3}": "its option 'every' is 3, and must be a results.spec.Option",
    "model = 'elsewhere.modle:Model'": "'elsewhere.modle:Model', and module elsewhere.modle does not exist",
    "model = 'elsewhere:Modle'.lower()": "its model is 'elsewhere:modle', and elsewhere has no modle",
    "model = 'elsewhere.Model'": "its model is 'elsewhere.Model', and must be package.module:name",
    "promise = property(lambda self: [][0])": "has facts that fail: IndexError",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_facts_is_found_when_they_are_imported(package, mistake) -> None:
    module = f"""
from strategies.facts import StrategyFacts

class Fast(StrategyFacts):
    name, help, model = "fast", "nothing", "elsewhere:Model"
    {mistake}

    def terms(self, cell, parts):
        return iter(())
"""
    package("elsewhere", {"fast": "elsewhere:Fast"}, module)
    failed = Registry("strategy", [], base=StrategyFacts).admit_all()
    said = str(failed["fast"])
    assert said.startswith("strategy 'fast' of the package elsewhere 1.0")
    assert MISTAKES[mistake] in said


def test_the_facts_of_bench_pass_the_checks_of_packages(package) -> None:
    for catalog in (STRATEGIES, COMPRESSIONS, COLLECTIVES):
        own = [facts for facts in catalog.all_facts if facts.name not in catalog.offered]
        points = {facts.name: f"{facts.__module__}:{facts.__name__}" for facts in own}
        package(f"all-{catalog.kind}", points, group=GROUPS[catalog.kind])
        for facts in own:
            catalog.require_sound(extensions(catalog.kind)[facts.name], facts)


def test_the_hash_is_over_the_source_of_the_package(tmp_path, package) -> None:
    package("elsewhere", {"fast": "elsewhere:Fast"})
    package("folder", {"far": "many.facts:Far"})
    (tmp_path / "many" / "deep").mkdir(parents=True)
    for name in ("many/__init__.py", "many/facts.py", "many/deep/model.py"):
        (tmp_path / name).write_text("")
    fast, far = (extensions("strategy")[name] for name in ("fast", "far"))
    before = package_hash(fast), package_hash(far)
    assert package_hash(fast) == before[0]
    assert fast.code == f"elsewhere 1.0 {before[0]}"
    (tmp_path / "many" / "deep" / "model.py").write_text("x = 1\n")
    assert package_hash(fast) == before[0] != package_hash(far) != before[1]
    (tmp_path / "elsewhere.py").write_text(FACTS + "# edited\n")
    assert package_hash(fast) != before[0]
    assert "elsewhere" not in sys.modules
    assert "many" not in sys.modules


def test_the_hash_is_over_all_code_of_the_distribution(tmp_path, package) -> None:
    package("elsewhere", {"fast": "elsewhere:Fast"})
    metadata = tmp_path / "elsewhere-1.0.dist-info"
    (metadata / "top_level.txt").write_text("elsewhere\nlisted\n")
    (metadata / "RECORD").write_text(
        "recorded/model.py,,\nrecorded/data.csv,,\nelsewhere.py,,\n../../bin/tool.py,,\n__editable__x.py,,\n"
    )
    named = ("listed.py", "recorded/__init__.py", "recorded/kernel.cu", "named_by_another.py")
    ignored = ("recorded/data.csv", "unrelated.py", "__editable__x.py")
    for name in (*named, *ignored):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    points = {"fast": "elsewhere:Fast", "faster": "named_by_another:Facts"}
    (metadata / "entry_points.txt").write_text(
        "[bench.strategies]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
    )
    forget_packages()
    fast = extensions("strategy")["fast"]
    hashes = [package_hash(fast)]
    for name in named:
        (tmp_path / name).write_text("edited = True\n")
        hashes.append(package_hash(fast))
    assert len(set(hashes)) == 1 + len(named)
    for name in ignored:
        (tmp_path / name).write_text("edited = True\n")
    assert package_hash(fast) == hashes[-1]


TWENTY = """
import importlib.metadata, sys, time
real, asked = importlib.metadata.entry_points, []
importlib.metadata.entry_points = lambda **group: asked.append(group) or real(**group)
from harness.cli import run
code = run(sys.argv[1:])
loaded = sorted(name for name in sys.modules if name.startswith("dummy"))
print(code, len(asked), len(loaded), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def twenty(tmp_path_factory) -> Path:
    """20 packages, each with a name of each kind; only the first two of these kinds can be imported."""
    folder = tmp_path_factory.mktemp("twenty")
    for number in range(20):
        install(
            folder,
            f"dummy-{number}",
            {
                group: {f"{kind}-{number}": f"dummy{number}:{kind}"}
                for kind, group in (
                    ("strategy", "bench.strategies"),
                    ("launcher", "bench.launchers"),
                    ("section", "bench.sections"),
                    ("workload", "bench.workloads"),
                    ("command", "bench.commands"),
                    ("kind", "bench.kinds"),
                )
            },
        )
        (folder / f"dummy{number}.py").write_text(
            textwrap.dedent(f"""
            from strategies.facts import StrategyFacts

            class strategy(StrategyFacts):
                name, help, model = "strategy-{number}", "nothing", "dummy{number}:Model"

                def terms(self, cell, parts):
                    return iter(())
            """)
        )
    return folder


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TWENTY, *arguments],
        env={**os.environ, "PYTHONPATH": first_on_the_path(folder), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=True,
    )


def test_help_names_the_commands_of_packages_and_imports_none(twenty) -> None:
    done = bench(twenty, "--help")
    assert done.stderr.split() == ["0", "1", "0"]
    assert "command-19 Is of the package dummy-19." in " ".join(done.stdout.split())


def test_a_command_of_bench_asks_for_no_package(twenty) -> None:
    assert bench(twenty, "check", "--help").stderr.split() == ["0", "0", "0"]


def test_the_help_of_matrix_names_launchers_and_imports_none(twenty) -> None:
    done = bench(twenty, "matrix", "--help")
    assert done.stderr.split() == ["0", "1", "0"]
    assert "launcher-19 is of dummy-19" in " ".join(done.stdout.split())


def test_the_page_of_options_is_of_bench_alone(twenty) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.launchers.reference"],
        env={**os.environ, "PYTHONPATH": str(twenty)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (Path(__file__).parents[2] / "docs" / "options.md").read_text()


def test_list_names_the_package_of_each(twenty) -> None:
    done = bench(twenty, "list")
    assert done.stderr.split() == ["0", "1", "20"]
    said = " ".join(done.stdout.split())
    assert "strategy-7 nothing (of dummy-7 1.0)" in said
    for name in ("section-7", "command-7", "kind-7"):
        assert f"{name} is of dummy-7" in said
    assert "workload-7 workload 'workload-7' of the package dummy-7 1.0 cannot be imported" in said


def test_list_warns_of_a_group_that_bench_does_not_read(tmp_path) -> None:
    install(tmp_path, "a-package", {"bench.compressions": {"fast": "elsewhere:Fast"}})
    said = bench(tmp_path, "list").stderr
    assert (
        "the package a-package has entry points in the group bench.compressions, which bench does not" in said
    )
    assert "its groups are bench.strategies, bench.compressors, bench.collectives, " in said


THEIRS = """
from harness.launchers.campaign_call import CampaignCall
from harness.launchers.launcher import Launcher
from results.cell import Cell
from strategies.collectives.facts import CollectiveFacts
from workloads.catalog import Member
from workloads.shape import Shape, WorkloadFacts

class Star(CollectiveFacts):
    name, help = "star", "all to one"
    route = "strategies.collectives.ring:route"

class Abstract(Launcher):
    name = "abstract"

class Call(CampaignCall):
    def starter(self):
        pass

    def line(self, launch, path):
        return [][1]

class Broken(Launcher):
    name = "broken"

    def accept(self, call):
        return Call(call)

class Bare(Shape):
    def facts(self):
        return WorkloadFacts(family="bare")

BARE = Member(name="bare", help="nothing", shape=Bare(), batch=1, optimizer="sgd:lr=0.1")
"""
THEIR_POINTS = {
    "bench.collectives": {"star": "theirs:Star"},
    "bench.launchers": {"abstract": "theirs:Abstract", "broken": "theirs:Broken"},
    "bench.workloads": {"bare": "theirs:BARE"},
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--launcher", "abstract"], "launcher 'abstract' of the package theirs 1.0: .* implements accept"),
        (["--workload", "bare"], "workload 'bare' of the package theirs 1.0 has facts that fail: TypeError"),
        (["--launcher", "broken"], r"the package theirs 1.0 failed at theirs.py:\d+: IndexError: list index"),
    ],
)
def test_an_error_of_a_package_names_it(tmp_path, given, said) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    install(tmp_path, "theirs", THEIR_POINTS)
    call = "matrix --gpus 2 --workload mlp --strategy scratch-ddp --collective star --device cpu --dry-run"
    done = bench(tmp_path, *call.split(), *given)
    assert "a defect of bench" not in done.stderr
    assert re.search(said, done.stderr)
    # The launcher fails after its plan is shown.
    assert ("mlp-scratch-ddp-star-g002" in done.stdout) is (given[1] == "broken")


def test_facts_that_import_torch_are_refused(tmp_path) -> None:
    (tmp_path / "heavy.py").write_text("import torch\n" + FACTS)
    install(tmp_path, "heavy", {GROUP: {"fast": "heavy:Fast"}})
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("bench")),
            "matrix",
            "--strategy",
            "fast",
            "--gpus",
            "1",
            "--dry-run",
        ],
        env={**os.environ, "PYTHONPATH": first_on_the_path(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert (
        "error: strategy 'fast' of the package heavy 1.0: importing heavy:Fast imports torch, and planning "
        "must not" in done.stderr
    )
