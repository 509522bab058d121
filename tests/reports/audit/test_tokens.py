"""A length and a size that only the FLOPs a token of the other rows of the model tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reports.audit.audit import Audit
from reports.audit.tokens import ON_A_LINE, ONE_SIZE

Cells = dict[str, str]
Audited = Callable[..., Audit]
PARAMETERS = 1_207_959_552
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
RATES = (16_011.0, 14_007.0, 11_503.0, 8_017.0, 5_009.0)


def flops_per_token(length: int, parameters: int) -> int:
    """Of 24 layers of width 2048, which the table does not give."""
    return 6 * parameters + 12 * 24 * 2048 * length


@pytest.fixture
def lengths() -> list[Cells]:
    """Lines 2 to 6: a model with learned positions at five lengths."""
    rows = []
    for length, rate in zip(LENGTHS, RATES, strict=True):
        parameters = PARAMETERS + 2048 * length
        rows.append(
            {
                "model": "GPT-1.2B",
                "params": str(parameters),
                "seq_len": str(length),
                "gpus": "8",
                "tokens/s/gpu": f"{rate:.1f}",
                "tflops/gpu": f"{rate * flops_per_token(length, parameters) / 1e12:.2f}",
            }
        )
    return rows


def test_a_model_at_several_lengths_is_on_its_line(lengths: list[Cells], audited: Audited) -> None:
    audit = audited(lengths)
    assert audit.findings == ()
    assert audit.formulas["utilisation"][ON_A_LINE] == 5


@pytest.mark.parametrize(("place", "wrong"), [(4, 65_536), (1, 8000), (3, 2000), (0, 12_000)])
def test_another_length_is_found_by_the_other_lengths(
    lengths: list[Cells], audited: Audited, place: int, wrong: int
) -> None:
    lengths[place]["seq_len"] = str(wrong)
    (finding,) = audited(lengths).findings
    assert (finding.formula, finding.lines[0]) == (ON_A_LINE, 2 + place)
    told = float(finding.reading.removeprefix("a sequence length near "))
    assert told == pytest.approx(LENGTHS[place], rel=0.05)


def test_a_model_of_twice_the_parameters_is_found_at_a_long_sequence(
    lengths: list[Cells], audited: Audited
) -> None:
    # 6 N x 2 is less than the FLOPs a token, so that the row alone does not tell.
    lengths.append({**lengths[4], "params": str(2 * int(lengths[4]["params"])), "gpus": "16"})
    (finding,) = audited(lengths).findings
    assert (finding.formula, finding.lines[0]) == (ONE_SIZE, 7)


def test_two_lengths_that_are_off_say_nothing(lengths: list[Cells], audited: Audited) -> None:
    """No line is left that the others are on: another convention, and no mistake of one row."""
    for place in (0, 4):
        lengths[place]["tflops/gpu"] = f"{float(lengths[place]['tflops/gpu']) * 1.05:.2f}"
    assert [one for one in audited(lengths).findings if one.formula == ON_A_LINE] == []
