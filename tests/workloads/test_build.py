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


def test_an_import_error_without_a_name_keeps_its_own_words(user_folder: Path) -> None:
    (user_folder / "guarded.py").write_text("raise ModuleNotFoundError('needs layers 2 or later')\n")
    with pytest.raises(UsageError, match="py:guarded cannot be imported: needs layers 2 or later"):
        build_workload("py:guarded:build", source_folder=user_folder)


def test_an_error_inside_the_users_module_is_not_hidden(user_folder: Path) -> None:
    (user_folder / "wrong.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        build_workload("py:wrong:build", source_folder=user_folder)


def test_a_model_of_lazy_modules_is_named_with_the_fix(user_folder: Path, model_source: str) -> None:
    (user_folder / "lazy.py").write_text(model_source.replace("nn.Linear(3, 2)", "nn.LazyLinear(2)"))
    with pytest.raises(UsageError, match=r"weight has no shape yet: call the lazy modules once"):
        build_workload("py:lazy:build", source_folder=user_folder)


def test_what_is_no_workload_is_named(user_folder: Path) -> None:
    (user_folder / "plain.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(1, 1)\n")
    with pytest.raises(UsageError, match=r"build\(\) returned Linear, not a workloads\.Workload"):
        build_workload("py:plain:build", source_folder=user_folder)


def test_a_missing_function_is_named(user_folder: Path) -> None:
    (user_folder / "empty.py").write_text("build = 3\n")
    with pytest.raises(UsageError, match=r"empty\.py has no function 'build'"):
        build_workload("py:empty:build", source_folder=user_folder)


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
