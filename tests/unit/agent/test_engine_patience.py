"""Each cause of a crash has a budget of its own, and none spends another's."""

import pytest

from agent.engines.crash import PATIENCE, CrashCause
from agent.engines.state import (
    BecameReady,
    Cleared,
    EngineLimits,
    EngineState,
    Exited,
    Kill,
    Spawn,
    Spawned,
    StartRequested,
    State,
    Tick,
)

LIMITS = EngineLimits(start_deadline_s=60.0)


def up(now: float) -> EngineState:
    engine = EngineState(LIMITS)
    assert engine.handle(StartRequested(), now) == [Spawn(1)]
    engine.handle(Spawned(1, 4711), now)
    return engine


def crash(engine: EngineState, cause: CrashCause, now: float) -> bool:
    """Crash the engine and clear it away; return whether it is to start again soon, and have it do so."""
    assert engine.handle(Exited(engine.start, "ended", cause), now) == [Kill(engine.start, 0.0)]
    soon = engine.state is State.BACKING_OFF
    engine.handle(Cleared(engine.start), now)
    if soon:
        assert engine.wake_at is not None
        assert engine.handle(Tick(), engine.wake_at) == [Spawn(engine.start)]
        engine.handle(Spawned(engine.start, 4711), now)
        engine.handle(BecameReady(engine.start, 10.0), now)
    return soon


@pytest.mark.parametrize("cause", CrashCause)
def test_a_cause_is_tried_again_as_often_as_its_budget_allows_and_then_told_with_advice(cause: CrashCause) -> None:
    """Mutations seen to fail here: one budget for all; leave out the advice."""
    engine = up(0.0)
    budget = PATIENCE[cause].restart_budget if cause is not CrashCause.UNKNOWN else LIMITS.restart_budget
    assert [crash(engine, cause, 1.0 + number) for number in range(budget + 1)] == [True] * budget + [False]
    assert engine.state is State.FAILED
    assert PATIENCE[cause].advice in engine.note


def test_one_cause_spends_no_budget_of_another() -> None:
    engine = up(0.0)
    assert crash(engine, CrashCause.DRIVER, 1.0)
    assert crash(engine, CrashCause.CARD_MEMORY, 2.0)
    assert crash(engine, CrashCause.UNKNOWN, 3.0)
    assert not crash(engine, CrashCause.DRIVER, 4.0)


def test_after_its_pause_it_is_tried_once_more() -> None:
    engine = up(0.0)
    assert not crash(engine, CrashCause.INSTALLATION, 1.0)
    assert engine.wake_at == 1.0 + PATIENCE[CrashCause.INSTALLATION].pause_s
    assert engine.handle(Tick(), engine.wake_at - 1) == []
    assert engine.handle(Tick(), engine.wake_at) == [Spawn(2)]
