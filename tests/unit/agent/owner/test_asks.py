"""What an owner asks: the settings, and what is said of them."""

from pathlib import Path
from typing import Any

import pytest

from agent.config import parse_config
from agent.errors import ConfigInvalid
from agent.owner.asks import NOTHING_ASKED, Ask, AskSettings, ModelAsk, describe_asks, shortfall, terms_line

DEFAULT = Ask(prompt_micro=150_000, completion_micro=600_000)
SETTINGS = AskSettings(
    default=DEFAULT,
    models=(
        ModelAsk(model="smollm2-135m", prompt_micro=0, completion_micro=0),
        ModelAsk(model="smollm2-*", prompt_micro=1, completion_micro=2),
    ),
)


def parsed(asks: dict[str, Any]) -> AskSettings:
    engine = {"engine_id": "main", "kind": "fake", "model": "m"}
    return parse_config({"state_dir": "/s", "engines": [engine], "asks": asks}, Path("/")).asks


def test_the_first_model_that_fits_counts_and_else_the_default() -> None:
    """Mutation seen to fail: the last that fits."""
    assert SETTINGS.ask_for("smollm2-135m") == Ask(prompt_micro=0, completion_micro=0)
    assert SETTINGS.ask_for("smollm2-1.7b") == Ask(prompt_micro=1, completion_micro=2)
    assert SETTINGS.ask_for("another") == DEFAULT
    assert NOTHING_ASKED.ask_for("another") is None


def test_a_table_says_it() -> None:
    table = {
        "default": {"prompt_micro": 150_000, "completion_micro": 600_000},
        "models": [
            {"model": "smollm2-135m", "prompt_micro": 0, "completion_micro": 0},
            {"model": "smollm2-*", "prompt_micro": 1, "completion_micro": 2},
        ],
    }
    assert parsed(table) == SETTINGS


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ({"default": {"prompt_micro": -1, "completion_micro": 2}}, r"asks\.default\.prompt_micro must be .* 0 .*-1"),
        ({"default": {"prompt_micro": 1, "completion_micro": 2.5}}, r"asks\.default\.completion_micro must be a whole"),
        ({"default": {"prompt_micro": 1}}, r"missing key asks\.default\.completion_micro"),
        ({"default": {"prompt_micro": 1, "completion_micro": 2**40}}, r"asks\.default\.completion_micro must be"),
        ({"defalt": {}}, r"unknown key asks\.defalt: did you mean default"),
        ({"default": {"prompt": 1, "completion_micro": 1}}, r"unknown key asks\.default\.prompt"),
        (
            {"models": [{"model": "m", "prompt_micro": "1", "completion_micro": 1}]},
            r"asks\.models\[0\]\.prompt_micro must be a whole number",
        ),
        ({"models": [{"prompt_micro": 1, "completion_micro": 1}]}, r"missing key asks\.models\[0\]\.model"),
    ],
)
def test_what_is_no_ask_is_refused_with_the_key(asks: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        parsed(asks)


@pytest.mark.parametrize(
    ("paid", "enough"),
    [
        (DEFAULT, True),
        (Ask(prompt_micro=150_001, completion_micro=600_000), True),
        (Ask(prompt_micro=149_999, completion_micro=900_000), False),
        (Ask(prompt_micro=900_000, completion_micro=599_999), False),
        (None, False),
    ],
)
def test_an_order_must_pay_both_parts_and_say_so(paid: Ask | None, enough: bool) -> None:
    """Mutation seen to fail: an order that says nothing passes."""
    assert (shortfall(DEFAULT, paid) is None) == enough
    assert shortfall(None, paid) is None


def test_the_owner_reads_what_is_asked_before_anything_is_lent() -> None:
    text = "\n".join(describe_asks(SETTINGS))
    assert "smollm2-135m: 0 / 0" in text
    assert "models that are not named: 0.15 / 0.6" in text
    assert "every model: whatever the list price leaves" in "\n".join(describe_asks(NOTHING_ASKED))


def test_status_says_what_is_paid_and_why_nothing_is() -> None:
    ask = {"prompt_micro": 150_000, "completion_micro": 600_000}
    line = {"engine_id": "main", "asked": ask, "terms": {"ask": ask, "most": ask, "refusal": ""}}
    assert terms_line(line) == "engine main earns 0.15 / 0.6 credits per 1,000 tokens of prompt / answer: as you ask"
    assert (terms_line({**line, "asked": None}) or "").endswith("what the list price leaves")
    assert terms_line({**line, "terms": None}) is None
    refused = {**line, "terms": {"ask": None, "most": ask, "refusal": "it asks 2/2"}}
    assert terms_line(refused) == "engine main gets no work: it asks 2/2"
