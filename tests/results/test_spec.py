from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.errors import SpecError
from results.spec import Catalog, Entry, Option, split

COMPRESSORS = Catalog(
    "compression",
    [
        Entry(name="none", help="nothing"),
        Entry(
            name="topk",
            help="the largest entries",
            positional=Option(kind="float", help="the share that is kept", minimum=0),
            options=MappingProxyType(
                {
                    "feedback": Option(kind="bool", default=True, help="error feedback"),
                    "order": Option(kind="str", default="value", choices=("value", "index"), help="of what"),
                }
            ),
        ),
        Entry(
            name="powersgd",
            help="low rank",
            positional=Option(kind="int", default=1, minimum=1, help="the rank"),
            options=MappingProxyType({"warmup": Option(kind="int", default=10, minimum=0, help="steps")}),
        ),
        Entry(
            name="py",
            help="your own",
            positional=Option(kind="str", help="MODULE:FUNCTION"),
            options=MappingProxyType({"seed": Option(kind="int", help="none unless given")}),
        ),
        Entry(name="lowrank", help="alias", alias_of="powersgd:4:warmup=0"),
    ],
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("none", ("none", None, {})),
        (" topk:0.01 ", ("topk", "0.01", {})),
        ("py:a.b:f", ("py", "a.b:f", {})),
        ("py:a.b:f:seed=3", ("py", "a.b:f", {"seed": "3"})),
        ("powersgd:warmup=5", ("powersgd", None, {"warmup": "5"})),
        ("x:k=a=b", ("x", None, {"k": "a=b"})),
    ],
)
def test_a_text_splits_into_name_positional_and_options(text, parts) -> None:
    assert split(text) == parts


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("none", "none"),
        ("topk:0.01", "topk:0.01"),
        ("topk:1e-2", "topk:0.01"),
        ("topk:0.01:order=value:feedback=yes", "topk:0.01"),
        ("topk:0.01:order=index:feedback=no", "topk:0.01:feedback=false:order=index"),
        ("topk:0.01:feedback=0:order=index", "topk:0.01:feedback=false:order=index"),
        ("powersgd", "powersgd"),
        ("powersgd:1:warmup=10", "powersgd"),
        ("powersgd:warmup=3", "powersgd:warmup=3"),
        ("lowrank", "powersgd:4:warmup=0"),
        ("lowrank:warmup=7", "powersgd:4:warmup=7"),
        ("lowrank:warmup=10", "powersgd:4"),
        ("py:mine.net:build", "py:mine.net:build"),
        ("py:mine.net:build:seed=3", "py:mine.net:build:seed=3"),
    ],
)
def test_equal_specs_have_one_canonical_text(text, canonical) -> None:
    assert COMPRESSORS.parse(text).text == canonical


def test_a_spec_has_typed_values_with_the_defaults_filled_in() -> None:
    spec = COMPRESSORS.parse("topk:0.25:feedback=false")
    assert (spec.name, spec.positional) == ("topk", 0.25)
    assert spec.flag("feedback") is False
    assert spec.word("order") == "value"
    assert COMPRESSORS.parse("powersgd:4").integer("warmup") == 10
    assert COMPRESSORS.parse("py:a:b").options["seed"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tpok",
            "'tpok' (did you mean 'topk'?); there are: lowrank, none, powersgd, py, topk",
        ),
        ("zzz", "'zzz'; there are: lowrank, none, powersgd, py, topk"),
        ("", "''; there are: lowrank, none, powersgd, py, topk"),
        ("topk", "compression topk needs the share that is kept: write topk:..."),
        ("topk:much", "compression topk takes a number, not 'much'"),
        ("topk:-0.5", "compression topk is at least 0, not -0.5"),
        ("topk:nan", "compression topk is a finite number, not nan"),
        ("topk:inf", "compression topk is a finite number, not inf"),
        ("powersgd:2.5", "compression powersgd takes a whole number, not '2.5'"),
        ("powersgd:0", "compression powersgd is at least 1, not 0"),
        ("topk:1:feedback=perhaps", "compression topk: feedback takes true or false, not 'perhaps'"),
        ("topk:1:order=size", "compression topk: order is one of value, index, not 'size'"),
        (
            "powersgd:warmpu=3",
            "compression powersgd has no option 'warmpu' (did you mean 'warmup'?); its options: warmup",
        ),
        ("none:a=1", "compression none has no option 'a'; its options: none"),
        ("none:5", "compression none takes no '5'; options are written key=value"),
        ("lowrank:8", "compression 'lowrank:8': lowrank takes no '8'"),
        ("powersgd:warmup=3:4", "'powersgd:warmup=3:4': '4' is not key=value, and options come last"),
        ("powersgd:warmup=", "'powersgd:warmup=': 'warmup=' is not key=value, and options come last"),
        ("powersgd:warmup=1:warmup=2", "'powersgd:warmup=1:warmup=2' gives warmup twice"),
    ],
)
def test_a_refusal_says_what_exists(text, message) -> None:
    with pytest.raises(SpecError) as error:
        COMPRESSORS.parse(text)
    assert message in str(error.value)


@given(
    share=st.floats(0, 1, allow_nan=False), feedback=st.booleans(), order=st.sampled_from(("value", "index"))
)
def test_the_canonical_text_reads_back_to_the_same_spec(share, feedback, order) -> None:
    spec = COMPRESSORS.parse(f"topk:{share!r}:order={order}:feedback={str(feedback).lower()}")
    again = COMPRESSORS.parse(spec.text)
    assert (again.text, again.positional, again.options) == (spec.text, share, spec.options)


@given(text=st.text(alphabet="topkynea:=.0123 ", max_size=16))
def test_no_text_fails_without_a_message(text) -> None:
    try:
        spec = COMPRESSORS.parse(text)
    except SpecError as error:
        assert str(error)  # noqa: PT017
    else:
        assert COMPRESSORS.parse(spec.text).text == spec.text
