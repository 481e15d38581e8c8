"""When an agent takes a capability challenge up, and what ends one."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import events as e
from agent.owner.consent import Consent, ConsentSettings
from agent.owner.events import CPU_CARD, LocalTimeObserved
from agent.owner.lending import EngineUse
from agent.testing import ENGINE_ID
from agent.testing_state import WELCOME, Game, order

GPU = "GPU-1"
NOON = LocalTimeObserved(2, 12 * 60, "2026-12-02")


def asked(game: Game, challenge_id: str = "one", card: str = "") -> e.AnswerChallenge:
    [command] = game.play(e.ChallengeAsked(challenge_id, card))
    assert isinstance(command, e.AnswerChallenge)
    assert (command.challenge_id, command.card_id) == (challenge_id, card)
    return command


def stops(commands: list[e.Command]) -> list[str]:
    return [command.reason for command in commands if isinstance(command, e.StopChallenge)]


def test_a_card_that_is_lent_and_idle_is_shown() -> None:
    assert asked(Game()).refusal == ""


def test_memory_may_be_filled_where_no_engine_holds_the_card() -> None:
    """Mutation seen to fail here: `free` is always true."""
    game = Game(engines={ENGINE_ID: EngineUse(cards=(GPU,))})
    game.play(e.CardsListed((GPU, CPU_CARD)), e.CardLent(GPU))
    assert not asked(game, card=GPU).free
    game.play(e.ChallengeEnded("one"))
    assert asked(game, "two").free


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (lambda game: asked(game, "another"), "busy: another challenge is being answered"),
        (lambda game: game.begin(), "busy: attempts are running"),
        (lambda game: game.play(e.OwnerDrainChanged(True)), "this node takes no work now"),
        (lambda game: game.play(e.CardWithdrawn(CPU_CARD, "a game")), "not lent: "),
        (
            lambda game: game.play(
                e.LocalTimeKnown(NOON), e.ConsentChanged(Consent(ConsentSettings(hours=("22:00-07:00",))))
            ),
            "outside of the owner's consent: ",
        ),
    ],
    ids=["one at a time", "busy", "draining", "not lent", "outside the hours"],
)
def test_what_speaks_against_it_is_said(before: Callable[[Game], object], why: str) -> None:
    """Mutations seen to fail here: each of the five conditions left out."""
    game = Game()
    before(game)
    assert asked(game).refusal.startswith(why)


def test_a_card_of_another_name_is_not_lent() -> None:
    assert asked(Game(), card="GPU-of-somebody-else").refusal.startswith("not lent: ")


def test_a_refused_challenge_leaves_room_for_the_next() -> None:
    game = Game()
    game.play(e.OwnerDrainChanged(True))
    asked(game)
    game.play(e.OwnerDrainChanged(False))
    assert asked(game, "two").refusal == ""


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (e.AssignmentReceived(order(), 1), "work comes first"),
        (e.CardWithdrawn(CPU_CARD, "a game"), "the owner wants the card"),
        (e.Disconnected("gone"), "the connection is lost"),
        (e.StopRequested(), "this agent stops"),
    ],
    ids=["work", "owner", "connection", "stop"],
)
def test_a_challenge_that_is_answered_is_broken_off(event: e.Event, reason: str) -> None:
    """Mutations seen to fail here: each of the four calls of `stop` left out."""
    game = Game()
    assert stops(game.play(event)) == []
    game = Game()
    asked(game)
    assert stops(game.play(event)) == [reason]


def test_the_next_one_waits_until_the_prover_is_gone() -> None:
    game = Game()
    asked(game)
    game.play(e.CardWithdrawn(CPU_CARD, "a game"), e.CardLent(CPU_CARD))
    assert asked(game, "two").refusal.startswith("busy: another")
    game.play(e.ChallengeEnded("one"))
    assert asked(game, "three").refusal == ""


def test_the_end_of_another_challenge_is_not_the_end_of_this_one() -> None:
    game = Game()
    asked(game)
    game.play(e.ChallengeEnded("two"))
    assert asked(game, "three").refusal.startswith("busy: another")


@given(st.lists(st.sampled_from(["ask", "end", "take", "lend", "lose", "come"]), max_size=40))
def test_at_most_one_prover_runs_and_only_on_a_card_that_is_lent(steps: list[str]) -> None:
    game, lent = Game(), True
    open_ids: set[str] = set()
    for number, step in enumerate(steps):
        commands = game.play(
            {
                "ask": e.ChallengeAsked(str(number), ""),
                "end": e.ChallengeEnded(next(iter(open_ids), "none")),
                "take": e.CardWithdrawn(CPU_CARD, "a game"),
                "lend": e.CardLent(CPU_CARD),
                "lose": e.Disconnected("gone"),
                "come": WELCOME,
            }[step]
        )
        lent = {"take": False, "lend": True}.get(step, lent)
        if step == "end":
            open_ids.clear()
        if step in ("take", "lose"):
            assert len(stops(commands)) == len(open_ids)
        taken = {one.challenge_id for one in commands if isinstance(one, e.AnswerChallenge) and not one.refusal}
        assert not taken or (lent and not open_ids)
        open_ids |= taken
