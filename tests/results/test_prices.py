"""Prices: which one is counted with, and files that are refused with the fix."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from results.catalogue.prices import (
    Price,
    catalogue_prices,
    checked_usd,
    chosen,
    device_prices,
    read_prices,
)
from results.errors import UsageError

HEAD = "gpu,usd_per_gpu_hour,price_date,price_source\n"
COLUMNS_OF_ALL = HEAD.replace("\n", ",provider,instance,region,gpu_count,note\n")


def price(usd: float, date: str | None = None, gpu_count: int | None = None, source: str = "a list") -> Price:
    day = datetime.date.fromisoformat(date) if date else None
    return Price(usd_per_gpu_hour=usd, source=source, date=day, gpu_count=gpu_count)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "prices.csv"


def test_a_file_of_four_columns_is_enough(file) -> None:
    file.write_text(HEAD + "My GPU,2.50,2026-07-01,our contract\nMy GPU,3,,a guess\nOther,,2026-07-01,\n")
    assert read_prices(file) == {
        "My GPU": [price(2.5, "2026-07-01", source="our contract"), price(3, source="a guess")]
    }


def test_the_other_columns_are_read_and_a_spreadsheets_mark_is_not(file) -> None:
    file.write_text(
        "\ufeff" + COLUMNS_OF_ALL + 'G, 1.5 ,2026-01-31,"list, page 2",aws,p9.large,us-east-1,8,spot\n'
    )
    (found,) = read_prices(file)["G"]
    assert found == Price(
        usd_per_gpu_hour=1.5,
        source="list, page 2",
        date=datetime.date(2026, 1, 31),
        provider="aws",
        instance="p9.large",
        region="us-east-1",
        gpu_count=8,
        note="spot",
    )
    assert found.place == "aws p9.large, us-east-1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "G,-1,2026-01-01,list\n", "line 2: usd_per_gpu_hour"),
        (HEAD + "G,1,,list\nG,0,,list\n", "line 3: usd_per_gpu_hour"),
        (HEAD + "G,nan,,list\n", "line 2: usd_per_gpu_hour"),
        (HEAD + "G,inf,,list\n", "line 2: usd_per_gpu_hour"),
        (HEAD + "G,$2,,list\n", "line 2: usd_per_gpu_hour is a number such as 2.50, not '$2'"),
        (HEAD + "G,2,July,list\n", "line 2: price_date is a day such as 2026-07-20, or empty"),
        (HEAD + "G,2,2026-01-01,\n", "line 2: price_source is empty; say where the price is from"),
        (HEAD + "G,2\n", "line 2: price_source is empty; say where the price is from"),
        (HEAD + ",2,,list\n", "line 2: gpu is empty; name the device"),
        (HEAD + "G,,,list\n", "has no price: give rows with gpu, usd_per_gpu_hour"),
        (HEAD, "has no price: give rows with gpu, usd_per_gpu_hour"),
        ("", "has no column gpu, usd_per_gpu_hour, price_date, price_source; a price file is a CSV"),
        ("gpu,usd_per_gpu_hour\nG,2\n", "has no column price_date, price_source; a price file is a CSV"),
        (
            COLUMNS_OF_ALL + "G,2,,list,,,,0,\n",
            "line 2: gpu_count is a whole number from 1, or empty, not '0'",
        ),
        (
            COLUMNS_OF_ALL + "G,2,,list,,,,x,\n",
            "line 2: gpu_count is a whole number from 1, or empty, not 'x'",
        ),
    ],
)
def test_a_bad_file_is_refused_with_line_and_rule(file, text, message) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        read_prices(file)
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)


def test_a_path_that_is_not_a_text_file_is_refused(tmp_path, file) -> None:
    with pytest.raises(UsageError, match="there is no price file"):
        read_prices(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_prices(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not readable as CSV in UTF-8"):
        read_prices(file)


def test_the_lowest_of_the_newest_date_is_chosen() -> None:
    old, dear, cheap = price(1.0, "2026-01-01"), price(4.0, "2026-06-01"), price(3.0, "2026-06-01")
    assert chosen([old, dear, cheap], gpus_per_node=1) == cheap
    assert chosen([price(0.5, None), old], gpus_per_node=1) == old
    assert chosen([price(0.5, None)], gpus_per_node=1) == price(0.5, None)
    assert chosen([], gpus_per_node=1) is None


def test_an_instance_is_large_enough_for_a_node_if_one_is() -> None:
    small, large = price(1.0, "2026-06-01", gpu_count=1), price(2.0, "2026-06-01", gpu_count=8)
    unsaid = price(1.5, "2026-06-01")
    assert chosen([small, large], gpus_per_node=1) == small
    assert chosen([small, large], gpus_per_node=2) == large
    assert chosen([small, large], gpus_per_node=8) == large
    # No instance has 16: any is better than no price.
    assert chosen([small, large], gpus_per_node=16) == small
    assert chosen([small, large, unsaid], gpus_per_node=16) == unsaid


@pytest.mark.parametrize(
    ("device", "gpus_per_node", "usd", "instance"),
    [
        # prices.csv, lists of 2026-07-20: these lines are looked up by hand.
        ("NVIDIA H100 80GB HBM3", 8, 6.88, "p5.48xlarge"),
        ("NVIDIA L4", 1, 0.8048, "g6.xlarge"),
        ("NVIDIA L4", 8, 1.6688, "g6.48xlarge"),
        ("NVIDIA A10G", 8, 2.036, "g5.48xlarge"),
        ("NVIDIA H200", 8, 7.912, "p5en.48xlarge"),
        ("Tesla V100-SXM2-16GB", 8, 3.06, "p3.16xlarge"),
        # The 32 GB variant has the peaks of the other, and a price of its own.
        ("Tesla V100-SXM2-32GB", 8, 3.9015, "p3dn.24xlarge"),
        ("NVIDIA A100 80GB PCIe", 4, 3.673, "Standard_NC96ads_A100_v4"),
        ("NVIDIA GH200 480GB", 1, 2.29, "gpu_1x_gh200"),
    ],
)
def test_a_device_is_found_by_the_name_of_its_driver(device, gpus_per_node, usd, instance) -> None:
    found = chosen(device_prices(catalogue_prices(), device), gpus_per_node=gpus_per_node)
    assert (found.usd_per_gpu_hour, found.instance) == (usd, instance)


@pytest.mark.parametrize(
    "device", ["AMD EPYC 9R14", "", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"]
)
def test_a_device_outside_of_the_catalogue_has_no_price(device) -> None:
    assert device_prices(catalogue_prices(), device) == ()


def test_a_name_as_given_comes_before_the_catalogues_name_of_it() -> None:
    own, general = [price(1.0, None)], [price(2.0, None)]
    prices = {"NVIDIA L4": own, "L4-24GB": general}
    assert device_prices(prices, "NVIDIA L4") == own
    assert device_prices({"L4-24GB": general}, "NVIDIA L4") == general


def test_every_price_of_the_catalogue_has_a_source_and_a_date_or_says_that_it_has_none() -> None:
    every = [price for prices in catalogue_prices().values() for price in prices]
    assert len(every) == 58
    assert all(price.source and price.provider and price.instance for price in every)
    undated = [price for price in every if price.date is None]
    assert all(
        "undated" in f"{price.source} {price.note}" or "of 2024" in (price.note or "") for price in undated
    )


@pytest.mark.parametrize("value", [0.0, -2.5, float("nan"), float("inf")])
def test_a_price_is_more_than_nothing(value) -> None:
    with pytest.raises(UsageError, match=f"--price .*, not {value:g}"):
        checked_usd(value, "--price")
