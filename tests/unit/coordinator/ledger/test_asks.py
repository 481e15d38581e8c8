"""What is paid of what is asked. Mutations seen to fail are named at each test."""

from dataclasses import replace

import pytest

from coordinator.ledger.asks import Asks
from coordinator.ledger.prices import Price, Terms
from coordinator.scheduler.testing import DIGEST, engine_view
from inference.task import ManifestDigest

# 20 % below the list.
MOST = Price(prompt_micro=800, completion_micro=4_000)
TERMS = Terms(list_prices={"model": Price(1_000, 5_000)}, fee_permille=200)


def priced() -> Asks:
    asks = Asks(TERMS)
    asks.add_model(DIGEST, "model")
    return asks


@pytest.mark.parametrize(
    ("ask", "paid"),
    [
        (None, MOST),
        (MOST, MOST),
        (Price(0, 0), Price(0, 0)),
        (Price(800, 3_999), Price(800, 3_999)),
        (Price(801, 0), None),
        (Price(0, 4_001), None),
    ],
)
def test_an_ask_is_paid_as_far_as_the_list_leaves_it_in_both_parts(ask: Price | None, paid: Price | None) -> None:
    """Mutation seen to fail: one part compared alone."""
    assert priced().in_force(engine_view(ask=ask)) == paid


def test_an_engine_is_told_what_it_may_ask_and_why_what_it_asks_is_not_paid() -> None:
    good, bad = priced().terms([engine_view(ask=Price(1, 2)), engine_view(ask=Price(801, 2))])
    assert (good.ask, good.most, good.refusal) == (Price(1, 2), MOST, "")
    assert (bad.ask, bad.most) == (None, MOST)
    assert "asks 801/2" in bad.refusal
    assert "leaves 800/4000" in bad.refusal


def test_an_ask_is_held_against_the_price_of_the_model_as_soon_as_the_model_is_served() -> None:
    """A name that the node gives its engine is no matter: the digest has a price.

    Mutation seen to fail: what was found for a digest is kept when a model is added.
    """
    asks, engine = Asks(TERMS), engine_view(ask=Price(1_000, 5_000))
    assert asks.in_force(engine) == Price(1_000, 5_000), "within the default list"
    asks.add_model(DIGEST, "model")
    assert asks.in_force(engine) is None
    assert asks.in_force(replace(engine, manifest_digest=ManifestDigest("other"))) == Price(1_000, 5_000)
