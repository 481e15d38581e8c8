"""When an engine is started, killed, restarted and given up on."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.engines.state import (
    BecameReady,
    Cleared,
    Command,
    EngineLimits,
    EngineState,
    Event,
    Exited,
    Kill,
    KillFailed,
    ProcessFate,
    Spawn,
    Spawned,
    SpawnFailed,
    StartRequested,
    State,
    StopRequested,
    Tick,
    Unhealthy,
)

LIMITS = EngineLimits(start_deadline_s=60.0)


def started(now: float = 0.0) -> EngineState:
    state = EngineState(LIMITS)
    assert state.handle(StartRequested(), now) == [Spawn(1)]
    assert state.handle(Spawned(1, pid=100), now) == []
    return state


def ready(now: float = 0.0) -> EngineState:
    state = started(now)
    state.handle(BecameReady(1, tokens_per_second=50.0), now)
    return state


def crash(state: EngineState, now: float) -> None:
    """Have the current process crash and be cleared away."""
    assert state.handle(Exited(state.start, "crashed"), now) == [Kill(state.start, 0.0)]
    assert state.handle(Cleared(state.start), now) == []


def test_an_engine_is_ready_only_after_it_made_tokens() -> None:
    state = started()
    assert (state.state, state.pid) == (State.STARTING, 100)
    state.handle(BecameReady(1, tokens_per_second=50.0), 5.0)
    assert (state.state, state.tokens_per_second, state.wake_at) == (State.READY, 50.0, None)


def test_a_crashed_engine_starts_again_after_a_pause_and_not_before_all_of_it_is_gone() -> None:
    state = ready()
    assert state.handle(Exited(1, "killed by SIGKILL"), 10.0) == [Kill(1, 0.0)]
    assert state.state is State.BACKING_OFF
    assert state.note == "killed by SIGKILL"
    # Children hold the card's memory still: no new process however much time passes.
    assert state.handle(Tick(), 1000.0) == []
    assert state.handle(Cleared(1), 1000.0) == [Spawn(2)]
    assert state.restarts == 1


def test_a_start_that_takes_too_long_is_killed() -> None:
    state = started()
    assert state.wake_at == 60.0
    assert state.handle(Tick(), 59.9) == []
    assert state.handle(Tick(), 60.0) == [Kill(1, 0.0)]
    assert state.note == "not ready after 60 s"


def test_a_wedged_engine_is_killed_though_its_process_lives() -> None:
    state = ready()
    assert state.handle(Unhealthy(1, "no token"), 10.0) == [Kill(1, 0.0)]
    assert state.state is State.BACKING_OFF


def test_pauses_double_within_a_window() -> None:
    state = ready()
    pauses = []
    now = 10.0
    for _ in range(3):
        crash(state, now)
        due_at = state.wake_at
        assert due_at is not None
        pauses.append(due_at - now)
        now = due_at
        assert state.handle(Tick(), now) == [Spawn(state.start)]
    assert pauses == [1.0, 2.0, 4.0]


def test_the_fourth_crash_in_ten_minutes_fails_the_engine_for_a_long_pause() -> None:
    # Mutation tried: `>` for `>=` in the comparison with the budget restarts a fourth time.
    state = ready()
    now = 0.0
    for _ in range(3):
        crash(state, now)
        now = state.wake_at or 0.0
        state.handle(Tick(), now)
    crash(state, now)
    assert state.state is State.FAILED
    assert state.wake_at == now + 600.0
    assert state.handle(Tick(), now + 599.0) == []
    assert state.handle(Tick(), now + 600.0) == [Spawn(5)]


def test_crashes_far_apart_spend_no_budget() -> None:
    state = ready()
    for number in range(1, 20):
        now = number * 601.0
        crash(state, now)
        assert state.state is State.BACKING_OFF
        state.handle(Tick(), now + 1.0)


def test_a_process_that_cannot_be_spawned_counts_as_a_crash() -> None:
    state = EngineState(LIMITS)
    state.handle(StartRequested(), 0.0)
    assert state.handle(SpawnFailed(1, "no such interpreter"), 0.0) == [Kill(1, 0.0)]
    assert (state.state, state.note) == (State.BACKING_OFF, "no such interpreter")


def test_survivors_of_sigkill_bar_the_next_start_and_are_named() -> None:
    state = ready()
    state.handle(Exited(1, "crashed"), 0.0)
    assert state.handle(KillFailed(1, (7, 8)), 10.0) == []
    assert state.state is State.FAILED
    assert "7, 8" in state.note
    assert state.handle(Tick(), 610.0) == [Kill(1, 0.0)]
    assert state.process is ProcessFate.DYING


@pytest.mark.parametrize("survivors", [(), (7,)])
def test_a_stop_ends_stopped_and_says_what_survived(survivors: tuple[int, ...]) -> None:
    state = ready()
    assert state.handle(StopRequested(), 0.0) == [Kill(1, LIMITS.stop_grace_s)]
    outcome = KillFailed(1, survivors) if survivors else Cleared(1)
    assert state.handle(outcome, 1.0) == []
    assert state.state is State.STOPPED
    assert bool(state.note) == bool(survivors)


def test_a_start_after_survivors_kills_again_first() -> None:
    state = ready()
    state.handle(StopRequested(), 0.0)
    state.handle(KillFailed(1, (7,)), 1.0)
    assert state.handle(StartRequested(), 2.0) == [Kill(1, 0.0)]


def test_a_start_asked_for_while_stopping_comes_after_the_stop() -> None:
    state = ready()
    state.handle(StopRequested(), 0.0)
    assert state.handle(StartRequested(), 0.5) == []
    assert state.handle(Cleared(1), 1.0) == [Spawn(2)]


def test_a_stop_while_a_crash_is_cleared_away_waits_for_that_and_starts_nothing() -> None:
    state = ready()
    state.handle(Exited(1, "crashed"), 0.0)
    assert state.handle(StopRequested(), 0.1) == []
    assert state.handle(Cleared(1), 0.2) == []
    assert state.state is State.STOPPED


def test_outcomes_of_an_older_start_change_nothing() -> None:
    state = ready()
    crash(state, 0.0)
    state.handle(Tick(), 1.0)
    for late in (BecameReady(1, 9.0), Exited(1, "late"), Unhealthy(1, "late"), Cleared(1), KillFailed(1, (5,))):
        assert state.handle(late, 2.0) == []
    assert state.state is State.STARTING


@dataclass
class World:
    """What commands do to a machine, as far as the promises speak of it."""

    state: EngineState = field(default_factory=lambda: EngineState(LIMITS))
    now: float = 0.0
    alive: set[int] = field(default_factory=set)
    dying: set[int] = field(default_factory=set)
    restarted_at: list[float] = field(default_factory=list)

    def feed(self, event: Event) -> None:
        restarts = self.state.restarts
        for command in self.state.handle(event, self.now):
            self.carry_out(command)
        self.restarted_at += [self.now] * (self.state.restarts - restarts)

    def carry_out(self, command: Command) -> None:
        match command:
            case Spawn(start):
                assert not self.alive, "two processes at once"
                self.alive.add(start)
            case Kill(start, _):
                assert start not in self.dying, "killed twice at once"
                self.dying.add(start)

    def act(self, action: str) -> None:
        start = self.state.start
        match action:
            case "start":
                self.feed(StartRequested())
            case "stop":
                self.feed(StopRequested())
            case "ready" if start in self.alive:
                self.feed(BecameReady(start, 10.0))
            case "crash" if start in self.alive:
                self.feed(Exited(start, "crash"))
            case "wedge" if start in self.alive:
                self.feed(Unhealthy(start, "wedged"))
            case "cleared" if start in self.dying:
                self.dying.discard(start)
                self.alive.discard(start)
                self.feed(Cleared(start))
            case "survived" if start in self.dying:
                self.dying.discard(start)
                self.feed(KillFailed(start, (1,)))
            case "late":
                self.feed(Exited(start - 1, "late"))
                self.feed(Cleared(start - 1))
            case "wait" if self.state.wake_at is not None:
                self.now = max(self.now, self.state.wake_at)
                self.feed(Tick())
            case "tick":
                self.now += 0.5
                self.feed(Tick())
            case _:
                # The outcome of something that does not exist.
                return


ACTIONS = st.sampled_from(
    ["start", "stop", "ready", "crash", "wedge", "cleared", "cleared", "survived", "late", "wait", "tick"]
)


@given(st.lists(ACTIONS, max_size=80))
def test_no_history_runs_two_processes_or_breaks_the_budget_and_a_stop_always_ends_stopped(actions: list[str]) -> None:
    """Mutation tried: `_give_up_process` that takes the process for gone starts a second one beside it."""
    world = World()
    world.act("start")
    for action in actions:
        world.act(action)
    for earlier, later in zip(world.restarted_at, world.restarted_at[LIMITS.restart_budget :], strict=False):
        assert later - earlier >= LIMITS.restart_window_s
    world.act("stop")
    world.act("cleared")
    assert world.state.state is State.STOPPED
    for action in ("wait", "tick", "late"):
        world.act(action)
    assert world.state.state is State.STOPPED
    assert not world.dying
