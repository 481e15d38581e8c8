"""What the owner's will does to engines and to what runs on them."""

import msgspec

from agent import events as e
from agent.owner.consent import Consent, ConsentSettings
from agent.owner.events import CPU_CARD, LocalTimeObserved
from agent.owner.lending import EngineUse
from agent.testing import ENGINE_ID, MODEL, ready_engine
from agent.testing_state import ONE, TWO, Game, failed, order, refused, sent_ids
from inference.task import TaskId, pack_token_ids
from protos.slackwater.common.v1 import capability_pb2

A, B = "GPU-a", "GPU-b"
GIVEN_BACK = capability_pb2.ENGINE_STATUS_GIVEN_BACK
UNLOADED = capability_pb2.ENGINE_STATUS_UNLOADED


def two_cards() -> Game:
    """A machine with two cards, an engine on each, both lent, and one attempt on each of them."""
    game = Game(engines={ENGINE_ID: EngineUse((A,)), "second": EngineUse((B,))})
    game.play(e.CardsListed((A, B)), e.CardLent(A), e.CardLent(B))
    game.play(e.ModelChecked("second", MODEL), e.EngineChanged(ready_engine("second")))
    game.begin(ONE)
    game.begin(TWO)
    assert {one.engine_id for one in game.state.attempts.values()} == {ENGINE_ID, "second"}
    return game


def reported(game: Game, event: e.Event) -> dict[str, capability_pb2.Engine]:
    """Return the engines as they are told after an event."""
    game.state.handle(event, game.now)
    game.now += 1.0
    states = [one for one in game.state.handle(e.Tick(), game.now) if isinstance(one, e.SendState)]
    return {engine.engine_id: engine for engine in states[-1].engines}


def test_an_owner_who_returns_gets_the_card_and_the_tasks_go_on_elsewhere() -> None:
    """The ids that are there leave first, then the end is told, and only then is the engine killed.

    Mutation seen to fail here: order the kill before the tasks are handed back.
    """
    game = Game()
    game.begin()
    game.chunk(ONE, 11)
    game.chunk(ONE, 12)
    commands = game.play(e.CardWithdrawn(CPU_CARD, "paused by its owner"))
    assert sent_ids(commands) == [(ONE, 1, [12])]
    assert commands[1:] == [
        e.AbortWork(ONE),
        failed(ONE, "OWNER_RETURNED", "paused by its owner"),
        e.StopEngine(ENGINE_ID, "paused by its owner"),
        e.StopEngine("second", "paused by its owner"),
    ]


def test_a_task_whose_prompt_is_still_coming_is_handed_back_as_well() -> None:
    game = Game()
    game.play(e.AssignmentReceived(order(), 2))
    commands = game.play(e.CardWithdrawn(CPU_CARD, "a game"))
    assert failed(ONE, "OWNER_RETURNED", "a game") in commands
    assert game.play(e.ChunkReceived(ONE, 0, pack_token_ids([1, 2]))) == []


def test_one_card_goes_back_while_the_task_on_the_other_goes_on() -> None:
    game = two_cards()
    [on_a] = [key for key, one in game.state.attempts.items() if one.engine_id == ENGINE_ID]
    commands = game.play(e.CardWithdrawn(A, "a game"))
    assert failed(on_a, "OWNER_RETURNED", "a game") in commands
    assert [one for one in commands if isinstance(one, e.StopEngine)] == [e.StopEngine(ENGINE_ID, "a game")]
    assert len(game.state.attempts) == 1


def test_nothing_is_taken_on_a_card_that_its_owner_has_though_the_engine_still_dies() -> None:
    """Mutation seen to fail here: ask the engine's own report alone whether it is ready."""
    game = Game()
    game.play(e.CardWithdrawn(CPU_CARD, "a game"))
    assert refused(game.play(e.AssignmentReceived(order(), 1))) == "ENGINE_NOT_READY"


def test_the_fleet_is_told_that_the_owner_has_the_card_and_why() -> None:
    game = Game()
    engine = reported(game, e.CardWithdrawn(CPU_CARD, "its owner is there"))[ENGINE_ID]
    assert (engine.status, engine.note) == (GIVEN_BACK, "its owner is there")
    back = reported(game, e.CardLent(CPU_CARD))[ENGINE_ID]
    assert back.status == capability_pb2.ENGINE_STATUS_READY


def test_a_survivor_of_its_kill_is_told_beside_the_reason() -> None:
    game = Game()
    game.play(e.CardWithdrawn(CPU_CARD, "its owner is there"))
    stopped = capability_pb2.Engine(
        engine_id=ENGINE_ID, status=capability_pb2.ENGINE_STATUS_STOPPED, note="processes 7 survive SIGKILL"
    )
    engine = reported(game, e.EngineChanged(stopped))[ENGINE_ID]
    assert engine.note == "its owner is there; processes 7 survive SIGKILL"


def test_a_lent_card_brings_its_engine_up() -> None:
    game = Game()
    game.play(e.CardWithdrawn(CPU_CARD, "a game"))
    assert game.play(e.CardLent(CPU_CARD)) == [e.StartEngine(ENGINE_ID), e.StartEngine("second")]


def test_an_idle_engine_is_unloaded_and_comes_back_for_the_first_task_that_waits() -> None:
    game = Game(engines={ENGINE_ID: EngineUse(unload_after_s=5.0)})
    game.begin()
    game.pass_time(10)
    game.play(e.CancelReceived(ONE))
    commands = game.pass_time(6)
    assert [one for one in commands if isinstance(one, e.StopEngine)] == [e.StopEngine(ENGINE_ID, "unused for 5 s")]
    [*_, told] = [one for one in commands if isinstance(one, e.SendState)]
    assert [(engine.status, engine.note) for engine in told.engines] == [(UNLOADED, "unused for 5 s")]
    wanted = e.DesiredReceived(1, False, frozenset(), (ENGINE_ID,))
    assert game.play(wanted) == [e.StartEngine(ENGINE_ID)]


def test_an_owner_who_drains_lets_what_runs_end_and_takes_nothing_new() -> None:
    game = Game()
    game.begin()
    assert game.play(e.OwnerDrainChanged(True)) == []
    assert ONE in game.state.attempts
    assert refused(game.play(e.AssignmentReceived(order(TWO), 1))) == "DRAINING"
    game.play(e.OwnerDrainChanged(False))
    game.begin(TWO)


def test_consent_that_is_withdrawn_ends_what_runs_outside_of_it_at_once() -> None:
    """Mutation seen to fail here: ask for consent when an order arrives, and never again."""
    game = Game()
    game.begin(ONE)
    narrow = Consent(msgspec.structs.replace(ConsentSettings(), service_classes=("batch",)))
    commands = game.play(e.ConsentChanged(narrow))
    assert failed(ONE, "OWNER_RETURNED", "consent.service_classes does not name 'interactive'") in commands
    assert not any(isinstance(one, e.StopEngine) for one in commands)
    assert refused(game.play(e.AssignmentReceived(order(TWO), 1))) == "CONSENT"


def test_hours_that_close_let_what_runs_end() -> None:
    game = Game()
    game.play(e.LocalTimeKnown(LocalTimeObserved(0, 12 * 60, "2026-12-02")))
    game.begin(ONE)
    assert game.play(e.ConsentChanged(Consent(ConsentSettings(hours=("22:00-07:00",))))) == []
    assert refused(game.play(e.AssignmentReceived(order(TWO), 1))) == "CONSENT"


def test_an_engine_of_a_model_that_is_not_wanted_any_more_is_taken_down() -> None:
    game = Game()
    game.begin(ONE)
    denied = ConsentSettings(models_denied=(MODEL.name,))
    commands = game.play(e.ConsentChanged(Consent(denied)))
    assert [type(one) for one in commands] == [e.AbortWork, e.SendFailed, e.StopEngine]
    assert game.play(e.ConsentChanged(Consent(ConsentSettings()))) == [e.StartEngine(ENGINE_ID)]


def test_the_daily_limit_counts_what_ran_and_what_is_promised() -> None:
    game = Game(slots=8)
    game.play(e.LocalTimeKnown(LocalTimeObserved(0, 0, "2026-12-02")))
    # A prompt of 3 and an answer of at most 8.
    game.play(e.ConsentChanged(Consent(ConsentSettings(daily_tokens=25))))
    game.begin(ONE)
    game.chunk(ONE, 11)
    game.play(e.CancelReceived(ONE))
    game.begin(TWO)
    third = order(ONE._replace(task_id=TaskId("task-3")))
    assert refused(game.play(e.AssignmentReceived(third, 1))) == "CONSENT"
    game.play(e.LocalTimeKnown(LocalTimeObserved(1, 0, "2026-12-03")))
    game.play(e.CancelReceived(TWO))
    game.begin(ONE._replace(attempt=2))


def test_after_a_sleep_engines_on_cards_start_anew_and_those_on_the_processor_go_on() -> None:
    game = two_cards()
    commands = game.play(e.MachineResumed(3600.0))
    assert [one for one in commands if isinstance(one, e.StopEngine | e.StartEngine)] == [
        e.StopEngine(ENGINE_ID, "the machine slept for 3600 s"),
        e.StartEngine(ENGINE_ID),
        e.StopEngine("second", "the machine slept for 3600 s"),
        e.StartEngine("second"),
    ]
    assert not game.state.attempts
    processor = Game()
    processor.begin(ONE)
    assert processor.play(e.MachineResumed(3600.0)) == []


def test_an_engine_that_loads_for_longer_than_it_may_be_unused_comes_up_all_the_same() -> None:
    """Mutation seen to fail here: count from the order to start instead of from when it is ready."""
    game = Game(engines={ENGINE_ID: EngineUse(unload_after_s=5.0)})
    starting = capability_pb2.Engine(engine_id=ENGINE_ID, status=capability_pb2.ENGINE_STATUS_STARTING)
    game.play(e.EngineChanged(starting))
    assert not any(isinstance(one, e.StopEngine) for one in game.pass_time(60))
    game.play(e.EngineChanged(ready_engine()))
    assert not any(isinstance(one, e.StopEngine) for one in game.pass_time(4))
    assert any(isinstance(one, e.StopEngine) for one in game.pass_time(2))
