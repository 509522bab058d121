"""A user's own model: how it is found, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from results.errors import SpecError, UsageError
from workloads.build import build_workload


def test_a_users_model_is_imported_from_its_folder(user_folder: Path, model_source: str) -> None:
    (user_folder / "mine.py").write_text(model_source)
    workload = build_workload("py:mine:build", source_folder=user_folder)
    inputs, targets = workload.synthetic(torch.Generator().manual_seed(0), 5)
    assert workload.module(inputs).shape == targets.shape == (5, 2)
    assert (workload.unit, workload.units_per_sample, workload.input) == ("samples", 1, None)


def test_a_users_package_may_import_its_neighbours(user_folder: Path, model_source: str) -> None:
    (user_folder / "nets").mkdir()
    (user_folder / "beside.py").write_text("from nets.model import build as inner\n")
    (user_folder / "nets" / "model.py").write_text(model_source)
    (user_folder / "nets" / "entry.py").write_text(
        "from beside import inner\n\n\ndef build():\n    return inner()\n"
    )
    workload = build_workload("py:nets.entry:build", source_folder=user_folder)
    assert sum(parameter.numel() for parameter in workload.module.parameters()) == 3 * 2 + 2


def test_code_from_elsewhere_is_named_with_the_folder_that_was_searched(user_folder: Path) -> None:
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
def test_what_is_wrong_with_a_users_model_is_named(
    user_folder: Path, model_source: str, source: str, kind: type[Exception], says: str
) -> None:
    lazy = model_source.replace("nn.Linear(3, 2)", "nn.LazyLinear(2)")
    (user_folder / "mine.py").write_text(lazy if source == "LAZY" else source)
    with pytest.raises(kind, match=says):
        build_workload("py:mine:build", source_folder=user_folder)


@pytest.mark.parametrize("module", ["scipy", "pytest.mine"])
def test_a_module_hidden_by_a_loaded_one_is_named(user_folder: Path, module: str) -> None:
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
