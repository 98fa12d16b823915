"""The one JSON form of numbers that JSON has none for."""

import json
import math

import pytest

from tacit._json import to_number, to_plain
from tacit.calibrate import Price
from tacit.privacy import Guarantee
from tacit.report import plain


def test_every_number_comes_back() -> None:
    told = {"a": (math.inf, [-math.inf, 0.5, 3]), 7: {"b": math.nan}, "c": None, "d": "text", "e": True}
    text = json.dumps(to_plain(told), allow_nan=False)
    found = json.loads(text)
    assert found == {"a": ["inf", ["-inf", 0.5, 3]], "7": {"b": "nan"}, "c": None, "d": "text", "e": True}
    assert [to_number(each) for each in ("inf", "-inf", 0.5, 3, "text", None)] == [
        math.inf, -math.inf, 0.5, 3, "text", None,
    ]  # fmt: skip
    assert math.isnan(to_number("nan"))


def test_everybody_writes_it_the_same_way() -> None:
    without = Guarantee(epsilon=math.inf, delta=1e-6)
    assert without.to_json()["epsilon"] == plain({"epsilon": math.inf})["epsilon"] == "inf"
    assert Guarantee.from_json(without.to_json()) == without
    price = Price(noise="laplace", amount=math.inf)
    assert price.to_json()["amount"] == "inf"
    assert Price.from_json(price.to_json()) == price


def test_no_price_is_read_from_a_word_for_no_number() -> None:
    for word in ("nan", "-inf"):
        with pytest.raises(ValueError, match="costs at least"):
            Price.from_json({"noise": "laplace", "amount": word})
