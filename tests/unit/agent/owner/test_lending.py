"""Which engines run, given whose the cards are. Mutations seen to fail here are named at their tests."""

import math

from agent import events as e
from agent.owner.events import CPU_CARD
from agent.owner.lending import UNLOAD_AFTER_S, EngineUse, Halt, Lending, Raise, Standing

A, B = "GPU-a", "GPU-b"


def lending(**engines: EngineUse) -> Lending:
    return Lending(engines, now=0.0)


def test_nothing_runs_before_anything_is_lent() -> None:
    one = lending(main=EngineUse())
    assert one.take(e.CardsListed((A,)), 0.0) == []
    assert one.standing("main") is Standing.GIVEN_BACK
    assert one.note("main") == "nothing has been decided about the card yet"


def test_an_engine_that_names_no_card_uses_all_of_them() -> None:
    """Mutation: lend it as soon as one of them is lent."""
    one = lending(main=EngineUse())
    one.take(e.CardsListed((A, B)), 0.0)
    assert one.take(e.CardLent(A), 0.0) == []
    assert one.take(e.CardLent(B), 0.0) == [Raise("main")]
    assert one.take(e.CardWithdrawn(A, "a game"), 1.0) == [Halt("main", "a game", owner=True)]


def test_one_card_goes_back_while_the_other_works_on() -> None:
    """Mutation: take every engine of the machine down."""
    one = lending(left=EngineUse((A,)), right=EngineUse((B,)), both=EngineUse((A, B)))
    one.take(e.CardsListed((A, B)), 0.0)
    one.take(e.CardLent(A), 0.0)
    assert one.take(e.CardLent(B), 0.0) == [Raise("right"), Raise("both")]
    assert one.engines_on(A) == ["left", "both"]
    halted = one.take(e.CardWithdrawn(A, "a game"), 1.0)
    assert halted == [Halt("left", "a game", owner=True), Halt("both", "a game", owner=True)]
    assert one.standing("right") is Standing.UP


def test_a_machine_without_a_card_lends_its_processor_until_it_has_one() -> None:
    one = lending(main=EngineUse())
    one.take(e.CardsListed((CPU_CARD,)), 0.0)
    assert one.take(e.CardLent(CPU_CARD), 0.0) == [Raise("main")]
    [halt] = one.take(e.CardsListed((A,)), 1.0)
    assert halt == Halt("main", "nothing has been decided about the card yet", owner=True)
    assert one.take(e.CardLent(A), 2.0) == [Raise("main")]


def test_an_engine_for_a_card_that_is_not_here_says_so() -> None:
    one = lending(main=EngineUse((B,)))
    one.take(e.CardsListed((A,)), 0.0)
    one.take(e.CardLent(A), 0.0)
    assert one.note("main") == f"this machine has no card {B}"


def test_a_second_withdrawal_changes_the_reason_and_kills_nobody_twice() -> None:
    one = lending(main=EngineUse())
    one.take(e.CardsListed((A,)), 0.0)
    one.take(e.CardLent(A), 0.0)
    one.take(e.CardWithdrawn(A, "a game"), 1.0)
    assert one.take(e.CardWithdrawn(A, "cooling down"), 2.0) == []
    assert one.note("main") == "cooling down"


def test_an_engine_that_nobody_uses_leaves_a_graphics_card_after_a_while() -> None:
    """Mutation: count from the start instead of from the last use."""
    one = lending(main=EngineUse())
    one.take(e.CardsListed((A,)), 0.0)
    one.take(e.CardLent(A), 0.0)
    one.use("main", 100.0)
    assert one.unload_idle(100.0 + UNLOAD_AFTER_S - 1) == []
    assert one.unload_idle(100.0 + UNLOAD_AFTER_S) == [Halt("main", "unused for 15 min", owner=False)]
    assert one.standing("main") is Standing.UNLOADED
    assert one.unload_idle(1e9) == []


def test_a_processor_keeps_its_engine_unless_its_owner_says_otherwise() -> None:
    one = lending(main=EngineUse(), other=EngineUse(unload_after_s=60.0), never=EngineUse(unload_after_s=math.inf))
    one.take(e.CardsListed((CPU_CARD,)), 0.0)
    one.take(e.CardLent(CPU_CARD), 0.0)
    assert one.unload_idle(1e6) == [Halt("other", "unused for 60 s", owner=False)]


def test_an_unloaded_engine_comes_up_when_work_waits_for_it_and_only_then() -> None:
    one = lending(main=EngineUse(unload_after_s=10.0))
    one.take(e.CardsListed((A,)), 0.0)
    one.take(e.CardLent(A), 0.0)
    one.unload_idle(10.0)
    assert one.want((), 11.0) == []
    assert one.want(("main", "unheard-of"), 12.0) == [Raise("main")]
    # It is loading, for as long as that takes.
    assert one.want(("main",), 21.0) == []
    assert one.unload_idle(30.0) == []
    assert one.unload_idle(31.0) == [Halt("main", "unused for 10 s", owner=False)]


def test_work_that_waits_brings_nothing_up_on_a_card_that_its_owner_has() -> None:
    """Mutation: want whatever is not up."""
    one = lending(main=EngineUse(unload_after_s=10.0))
    one.take(e.CardsListed((A,)), 0.0)
    one.take(e.CardLent(A), 0.0)
    one.unload_idle(10.0)
    one.take(e.CardWithdrawn(A, "a game"), 11.0)
    assert one.want(("main",), 12.0) == []
    assert one.take(e.CardLent(A), 20.0) == [Raise("main")]


def test_a_model_that_its_owner_does_not_accept_stays_down_on_a_lent_card() -> None:
    one = lending(main=EngineUse())
    one.take(e.CardsListed((A,)), 0.0)
    assert one.bar("main", "not this model", 0.0) == []
    assert one.take(e.CardLent(A), 0.0) == []
    assert one.note("main") == "not this model"
    assert one.bar("main", None, 1.0) == [Raise("main")]
    assert one.bar("main", "not this model", 2.0) == [Halt("main", "not this model", owner=True)]
