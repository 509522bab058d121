"""A user's own model: how it is found, what is said when it cannot be; files that it opens; values that are
drawn again."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from results.errors import BenchError, SpecError, UsageError
from workloads.build import DrawRecorder, InitialValues, build_workload, import_builder
from workloads.source import opened_files


def test_a_users_model_is_imported_from_its_folder(user_folder, model_source) -> None:
    (user_folder / "mine.py").write_text(model_source)
    workload = build_workload("py:mine:build", source_folder=user_folder)
    inputs, targets = workload.synthetic(torch.Generator().manual_seed(0), 5)
    assert workload.module(inputs).shape == targets.shape == (5, 2)
    assert (workload.unit, workload.units_per_sample, workload.input) == ("samples", 1, None)


def test_a_users_package_may_import_its_neighbours(user_folder, model_source) -> None:
    (user_folder / "nets").mkdir()
    (user_folder / "beside.py").write_text("from nets.model import build as inner\n")
    (user_folder / "nets" / "model.py").write_text(model_source)
    (user_folder / "nets" / "entry.py").write_text(
        "from beside import inner\n\n\ndef build():\n    return inner()\n"
    )
    workload = build_workload("py:nets.entry:build", source_folder=user_folder)
    assert sum(parameter.numel() for parameter in workload.module.parameters()) == 3 * 2 + 2


def test_code_from_elsewhere_is_named_with_the_folder_that_was_searched(user_folder) -> None:
    (user_folder / "needy.py").write_text("import company_layers\n\n\ndef build(): ...\n")
    with pytest.raises(UsageError) as caught:
        build_workload("py:needy:build", source_folder=user_folder)
    message = str(caught.value)
    assert "py:needy imports 'company_layers'" in message
    assert f"neither in the folder {user_folder} nor installed" in message


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        (
            "raise ModuleNotFoundError('needs layers 2 or later')",
            UsageError,
            "py:mine cannot be imported: needs layers 2 or later",
        ),
        # An error of the user's module is not hidden.
        ("1 / 0", ZeroDivisionError, "division by zero"),
        ("LAZY", UsageError, r"weight has no shape yet: call the lazy modules once"),
        (
            "import torch\ndef build():\n    return torch.nn.Linear(1, 1)",
            UsageError,
            r"build\(\) returned Linear, not a workloads\.Workload",
        ),
        ("build = 3", UsageError, r"mine\.py has no function 'build'"),
    ],
    ids=["import error", "own error", "lazy modules", "no workload", "no function"],
)
def test_an_error_in_a_users_model_is_named(user_folder, model_source, source, kind, says) -> None:
    lazy = model_source.replace("nn.Linear(3, 2)", "nn.LazyLinear(2)")
    (user_folder / "mine.py").write_text(lazy if source == "LAZY" else source)
    with pytest.raises(kind, match=says):
        build_workload("py:mine:build", source_folder=user_folder)


@pytest.mark.parametrize("module", ["scipy", "pytest.mine"])
def test_a_module_hidden_by_a_loaded_one_is_named(user_folder, module) -> None:
    __import__(module.partition(".")[0])
    path = user_folder.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text("def build(): ...\n")
    with pytest.raises(
        UsageError, match=r"another '\w+' .* is loaded already, so .* cannot be imported; rename your"
    ):
        build_workload(f"py:{module}:build", source_folder=user_folder)


def test_an_unknown_workload_lists_what_there_is() -> None:
    with pytest.raises(
        SpecError, match=r"no workload 'resnet5' \(did you mean 'resnet50'\?\); there are: gpt-nano"
    ):
        build_workload("resnet5")


CPU = torch.device("cpu")


class Held(nn.Module):
    """One parameter, which is frozen, and one buffer."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))


def recorded(make: Callable[[], nn.Module]) -> tuple[nn.Module, InitialValues]:
    with torch.device("meta"), DrawRecorder() as recorder:
        module = make()
    return module, recorder.values_of(module)


def test_the_last_write_counts_and_is_done_once() -> None:
    """Drawn twice, then filled: the fill gives the values."""
    module, initial = recorded(lambda: Held(torch.empty(3, 2).normal_().uniform_().fill_(7)))
    weight, count = module.weight, module.count
    initial(weight, CPU)
    initial(count, CPU)
    assert (weight.tolist(), weight.requires_grad) == ([[7.0, 7.0]] * 3, False)
    assert (count.tolist(), count.dtype) == ([1, 1], torch.int64)
    weight.fill_(5)
    initial(weight, CPU)
    assert weight.tolist() == [[5.0, 5.0]] * 3


def halves() -> Tensor:
    values = torch.empty(4)
    values[:2].fill_(1)
    return values


REFUSED = {
    "passes another one to aten.normal_": lambda: torch.empty(4).normal_(generator=torch.Generator()),
    "gives weight no separate values": lambda: torch.empty(4),
    "weight no separate values": lambda: torch.empty(2, 3).normal_().t(),
    "by aten.mul_": lambda: torch.ones(4).mul_(2),
    "by aten.randn": lambda: torch.randn(4),
    "by aten.copy_": lambda: torch.ones(4).copy_(torch.zeros(4)),
    r"writes \(2,\) on meta": halves,
    r"writes \(4,\) on cpu": lambda: torch.ones(4, device="cpu"),
    r"writes \(2, 2\) on meta": lambda: torch.empty(2, 2).t().zero_(),
}


@pytest.mark.parametrize(("words", "make"), REFUSED.items(), ids=REFUSED)
def test_what_could_not_be_drawn_again_is_refused(words, make) -> None:
    with pytest.raises(BenchError, match=words):
        recorded(lambda: Held(make()))


OPENING = """
import json
import os
from pathlib import Path

from torch import nn
from workloads import Workload

HERE = Path(__file__).parent


def build():
    with open(HERE / "a.json") as file:
        json.load(file)
    (HERE / "b.json").read_text()
    os.close(os.open(HERE / "c.json", os.O_RDONLY))
    (HERE / "written.json").write_text("{}")
    return Workload(module=nn.Linear(1, 1), step=print, synthetic=print)
"""


CONFIG = """
from pathlib import Path

WIDTH = int((Path(__file__).parent / "width.txt").read_text())
"""
MODELS = """
import config_{0}
from torch import nn
from workloads import Workload


def first():
    return Workload(module=nn.Linear(config_{0}.WIDTH, 1), step=print, synthetic=print)


second = first
"""


@pytest.mark.parametrize("before", ["imported", "first", "second"])
def test_what_a_module_opens_when_it_is_imported_is_of_every_model_that_imports_it(tmp_path, before) -> None:
    """In whichever order a process builds them, and where it has imported the module before."""
    (tmp_path / f"config_{before}.py").write_text(CONFIG)
    (tmp_path / f"models_{before}.py").write_text(MODELS.format(before))
    (tmp_path / "width.txt").write_text("3")
    functions = ["first", "second"] if before == "first" else ["second", "first"]
    if before == "imported":
        import_builder(f"py:models_{before}:first", source_folder=tmp_path)
    for function in functions:
        build_workload(f"py:models_{before}:{function}", source_folder=tmp_path)
        assert list(opened_files(f"models_{before}:{function}", tmp_path)) == ["width.txt"]


def test_files_that_are_read_are_known_and_those_that_are_written_are_not(tmp_path) -> None:
    before = builtins.open, io.open, os.open
    (tmp_path / "opening.py").write_text(OPENING)
    for name in "abc":
        (tmp_path / f"{name}.json").write_text("{}")
    build_workload("py:opening:build", source_folder=tmp_path)
    assert (builtins.open, io.open, os.open) == before
    assert list(opened_files("opening:build", tmp_path)) == ["a.json", "b.json", "c.json"]
