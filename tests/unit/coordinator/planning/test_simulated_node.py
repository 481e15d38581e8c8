"""What a simulated node says, and when: to the scheduler it must look like an agent."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from coordinator.planning.curves import EngineCurve
from coordinator.planning.simulation.churn import MS_PER_HOUR, Churn
from coordinator.planning.simulation.node import SILENCE_BUSY_S, SILENCE_IDLE_S, Node, Tally
from coordinator.planning.simulation.open_node import OpenNode, Runnable
from coordinator.planning.simulation.scenario import Fleet, Owners, digest_of
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.records import Choice, Why
from coordinator.scheduler.testing import task_spec
from inference.task import EngineId, FinishReason, NodeId

CURVE = EngineCurve(
    step_base_ms=10.0,
    step_sequence_ms=0.0,
    step_kv_token_ms=0.0,
    prefill_token_ms=0.0,
    request_ms=5.0,
    kv_tokens_max=10_000,
    slots_max=8,
    step_tokens_max=64,
)
ALWAYS = Owners()
# Each comes back within seconds of being lent, in all likelihood, and stays for long.
LOST = Owners(losses_per_hour=360.0, away_median_min=60.0, away_spread=0.0, reload_s=90.0)
VANISHING = Owners(crashes_per_hour=360.0, away_median_min=60.0, away_spread=0.0, reload_s=90.0)


class OneNode:
    """A world with one node: keeps to the port, and remembers what the scheduler was told, and when."""

    def __init__(self, owners: Owners, seed: int = 1) -> None:
        self.churn = Churn(seed, 0)
        self.now_ms = 0.0
        self.told: list[tuple[float, e.Event]] = []
        self.history: list[str] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._connections = 0
        self.fleet = Fleet(
            model="model", card="card", nodes=1, usd_per_hour=1, idle_w=1, load_w=1, owners=owners, line_bytes_per_s=1e6
        )
        self.tally = Tally()
        self.node = self.make_node()

    def make_node(self) -> Node:
        return Node(7, self.fleet, CURVE, 20.0, self.tally, self)

    def schedule(self, at_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        assert at_ms >= self.now_ms, "the past is over"
        heapq.heappush(self._heap, (at_ms, next(self._numbers), action, arguments))

    def tell(self, event: e.Event) -> None:
        self.told.append((self.now_ms, event))

    def lent(self, node: Node) -> None:
        self.history.append("lent")

    def lost(self, node: Node, *, crashed: bool) -> None:
        self.history.append("crashed" if crashed else "owner back")

    def connect(self, node: Node) -> e.ConnectionId:
        self._connections += 1
        return e.ConnectionId(self._connections)

    def run(self, until_ms: float) -> None:
        while self._heap and self._heap[0][0] <= until_ms:
            self.now_ms, _, action, arguments = heapq.heappop(self._heap)
            action(*arguments)
        self.now_ms = until_ms

    def order(self, *, attempt: int = 1, first_index: int = 0, tokens: int = 11, max_tokens: int = 100) -> None:
        spec = task_spec(max_tokens=max_tokens)
        order = c.Assign(
            node_id=NodeId("node"),
            connection_id=self.node.connection_id,
            engine_id=EngineId("engine"),
            sampler_profile="simulated",
            spec=spec,
            attempt=attempt,
            lease_epoch=attempt,
            prompt_ids=spec.prompt_ids,
            max_tokens=max_tokens - first_index,
            first_index=first_index,
            ask=None,
            choice=Choice(NodeId("node"), EngineId("engine"), Why.MEETS_TARGET, 0, 0.1, 0.01, 1.5),
        )
        self.node.take(order, tokens, self.now_ms)

    def heard(self, kind: type) -> list[tuple[float, Any]]:
        return [(at_ms, event) for at_ms, event in self.told if isinstance(event, kind)]


World = TypeVar("World", bound=OneNode)


def lent(owners: Owners, kind: type[World] = OneNode) -> World:  # type: ignore[assignment]  # It is the bound.
    """Return a world whose node is lent; such owners leave some seeds' nodes away at the start."""
    for seed in range(5_000):
        world = kind(owners, seed)
        world.node.join(0.0)
        if world.node.lent:
            return world
    raise AssertionError("no seed begins with a node that is lent")


def test_it_connects_and_then_says_what_it_has() -> None:
    world = lent(ALWAYS)
    world.run(30.0)
    (first_ms, connected), (second_ms, report) = world.told
    assert isinstance(connected, e.NodeConnected)
    assert isinstance(report, e.NodeReported)
    # One way, and what the engine's host adds.
    assert (first_ms, second_ms) == (25.0, 25.0)
    assert report.engines[0].ready
    assert report.engines[0].slots == 8


def test_it_sends_the_first_token_when_it_comes_and_the_rest_at_the_end() -> None:
    """Fails when frames overlap, leave a gap, or the last one comes after the end."""
    world = lent(ALWAYS)
    world.run(100.0)
    world.order(tokens=11)
    world.run(1_000.0)
    frames = world.heard(e.FramesReceived)
    assert [at_ms for at_ms, _ in frames] == pytest.approx([135.0, 235.0])
    assert [(frame.first_index, len(frame.token_ids)) for _, event in frames for frame in event.frames] == [
        (0, 1),
        (1, 10),
    ]
    ((_, finished),) = world.heard(e.AttemptFinished)
    assert list(finished.token_ids) == [one for _, event in frames for frame in event.frames for one in frame.token_ids]
    assert finished.finish_reason is FinishReason.STOP
    assert [type(event) for _, event in world.told][-2:] == [e.FramesReceived, e.AttemptFinished]


def test_an_answer_as_long_as_allowed_ends_for_its_length_and_without_a_stop_id() -> None:
    world = lent(ALWAYS)
    world.order(tokens=11, max_tokens=11)
    world.run(1_000.0)
    ((_, finished),) = world.heard(e.AttemptFinished)
    assert finished.finish_reason is FinishReason.LENGTH
    assert len(set(finished.token_ids)) == 1


def test_a_resumed_answer_goes_on_at_its_index() -> None:
    """Fails when the whole answer is computed again, or the index starts from 0."""
    world = lent(ALWAYS)
    world.order(attempt=2, first_index=6, tokens=11)
    world.run(1_000.0)
    frames = [frame for _, event in world.heard(e.FramesReceived) for frame in event.frames]
    assert [(frame.attempt, frame.first_index, len(frame.token_ids)) for frame in frames] == [(2, 6, 1), (2, 7, 4)]


def test_an_owner_who_comes_back_gets_the_card_and_all_that_was_computed_is_kept() -> None:
    """Fails when tokens are lost with the card, or the failure comes before them."""
    world = lent(LOST)
    world.order(tokens=9_000, max_tokens=9_500)
    world.run(MS_PER_HOUR / 2)
    ((failed_ms, failed),) = world.heard(e.AttemptFailed)
    assert failed.reason == "owner_returned"
    lost_ms = failed_ms - 25.0
    computed = sum(len(frame.token_ids) for _, event in world.heard(e.FramesReceived) for frame in event.frames)
    # A token every 10 ms from the first step on.
    assert computed == int(lost_ms / 10.0)
    reports = [report.engines[0].ready for _, report in world.heard(e.NodeReported)]
    assert reports == [True, False]
    assert not world.node.lent
    assert world.node.connected


def test_it_is_lent_again_after_the_owner_and_the_reload() -> None:
    world = lent(LOST)
    world.run(MS_PER_HOUR / 2)
    lost_ms = world.heard(e.NodeReported)[1][0]
    world.run(lost_ms + MS_PER_HOUR + 90_001.0)
    back_ms, report = world.heard(e.NodeReported)[2]
    assert report.engines[0].ready
    assert back_ms == pytest.approx(lost_ms + MS_PER_HOUR + 90_000.0)
    assert world.history[:3] == ["lent", "owner back", "lent"]


def test_a_node_that_vanishes_is_missed_after_its_silence() -> None:
    """Fails when the crash is told at once, or the tasks of a dead node are failed by it."""
    world = lent(VANISHING)
    world.order(tokens=9_000, max_tokens=9_500)
    world.run(MS_PER_HOUR / 2)
    ((missed_ms, _),) = world.heard(e.NodeDisconnected)
    assert not world.heard(e.AttemptFailed)
    *_, (flushed_ms, _) = world.heard(e.FramesReceived)
    crashed_ms = flushed_ms - 25.0
    assert SILENCE_BUSY_S - 1.0 <= (missed_ms - crashed_ms) / 1000.0 <= SILENCE_BUSY_S


def test_a_node_that_vanishes_without_work_is_missed_by_keepalive_or_by_its_first_order() -> None:
    """Fails when an order to a dead node waits for the keepalive."""
    world = lent(VANISHING)
    lost_ms = 0.0
    while world.node.connected:
        lost_ms += 100.0
        world.run(lost_ms)
    world.order()
    world.run(lost_ms + 1000.0 * SILENCE_IDLE_S + 1.0)
    first_ms, last_ms = (at_ms for at_ms, _ in world.heard(e.NodeDisconnected))
    assert first_ms == pytest.approx(lost_ms + 1000.0 * SILENCE_BUSY_S)
    assert last_ms == pytest.approx(lost_ms + 1000.0 * SILENCE_IDLE_S, abs=100.0)
    assert not world.heard(e.FramesReceived)


def test_it_comes_back_over_a_new_connection_and_old_orders_are_not_for_it() -> None:
    world = lent(VANISHING)
    old = world.node.connection_id
    world.run(2 * MS_PER_HOUR)
    assert [event.connection_id for _, event in world.heard(e.NodeConnected)][:2] == [old, old + 1]
    assert world.history[:3] == ["lent", "crashed", "lent"]
    told = len(world.told)
    world.node.cancel(old, task_spec().task_id, 1, world.now_ms)
    assert len(world.told) == told


def test_a_cancelled_attempt_is_not_heard_of_again() -> None:
    world = lent(ALWAYS)
    world.order(tokens=50)
    world.run(200.0)
    world.node.cancel(world.node.connection_id, task_spec().task_id, 1, world.now_ms)
    heard = len(world.heard(e.FramesReceived))
    world.run(5_000.0)
    assert len(world.heard(e.FramesReceived)) == heard == 1
    assert not world.heard(e.AttemptFinished)


def test_an_order_for_another_attempt_is_not_cancelled() -> None:
    world = lent(ALWAYS)
    world.order(attempt=2, tokens=50)
    world.run(200.0)
    world.node.cancel(world.node.connection_id, task_spec().task_id, 1, world.now_ms)
    world.run(5_000.0)
    assert len(world.heard(e.AttemptFinished)) == 1


def test_owners_come_back_in_their_hours() -> None:
    """All in the tenth hour of their day, two hours east of here. Fails without the time zone, or the start hour."""
    rhythm = tuple(1.0 if hour == 9 else 0.0 for hour in range(24))
    owners = Owners(losses_per_hour=5.0, rhythm=rhythm, time_zones=(2,))
    churn = Churn(1, start_hour=3)
    lost_h = [churn.lent_ms(owners, 0.5 * MS_PER_HOUR, 2) / MS_PER_HOUR + 0.5 for _ in range(300)]
    assert all(4.0 <= hour % 24.0 <= 5.0 for hour in lost_h)
    # In that hour they come back 24 times as often, so that the day has its mean.
    assert max(lost_h) < 24.0


def test_a_rhythm_leaves_the_mean_over_a_day() -> None:
    """Fails when a rhythm changes how often owners come back over the day."""
    owners = Owners(losses_per_hour=0.5, rhythm=(2.0,) * 12 + (1.0,) * 12)
    churn = Churn(1, 0)
    at_ms, losses = 0.0, 0
    while at_ms < 24_000 * MS_PER_HOUR:
        at_ms += churn.lent_ms(owners, at_ms, 0)
        losses += 1
    assert losses / 24_000 == pytest.approx(0.5, rel=0.05)


# ---- a node whose owner leaves the model to the fleet

FIRST, SECOND = digest_of("model"), digest_of("second")
SIZE_BYTES = 40_000_000
FETCH_MS = 40_000.0
LOAD_MS = 90_000.0
SWITCH_PATIENCE_MS = 30_000.0
SLOW = replace(CURVE, step_base_ms=20.0)


class OneOpenNode(OneNode):
    def make_node(self) -> OpenNode:
        self.open = OpenNode(
            7, self.fleet, {FIRST: Runnable(CURVE, 1), SECOND: Runnable(SLOW, SIZE_BYTES)}, 20.0, self.tally, self
        )
        return self.open

    def reports(self) -> list[tuple[float, str, bool]]:
        """Return what was said of the engine, and when it was said."""
        names = {FIRST: "first", SECOND: "second"}
        views = [(at_ms - 25.0, report.engines[0]) for at_ms, report in self.heard(e.NodeReported)]
        return [(at_ms, names[engine.manifest_digest], engine.ready) for at_ms, engine in views]


def test_an_open_engine_goes_on_while_files_come_and_changes_when_it_has_no_work() -> None:
    """Mutations seen to fail here: no load, no fetch, work taken while it changes, the first model's curve kept."""
    world = lent(ALWAYS, OneOpenNode)
    world.open.want(SECOND, 0.0)
    # Said again in the middle it changes nothing.
    world.run(20_000.0)
    world.open.want(SECOND, world.now_ms)
    world.order(tokens=2_500, max_tokens=2_600)
    world.run(41_000.0)
    assert world.reports() == [(0.0, "first", True), (40_000.0, "first", False)]
    world.order(attempt=9)
    world.run(44_000.0)
    ((_, refused),) = world.heard(e.AttemptFailed)
    assert (refused.attempt, refused.reason) == (9, "refused_engine_not_ready")
    world.run(200_000.0)
    # The answer began at 20 s with a token every 10 ms.
    changed_ms = 45_000.0
    assert world.reports()[2:] == [(changed_ms, "second", False), (changed_ms + LOAD_MS, "second", True)]
    assert (world.tally.model_changes, world.tally.fetched_bytes) == (1, SIZE_BYTES)
    assert len(world.heard(e.AttemptFinished)) == 1
    world.told.clear()
    world.order(tokens=11)
    world.run(300_000.0)
    assert [at_ms for at_ms, _ in world.heard(e.AttemptFinished)] == pytest.approx([200_000.0 + 11 * 20.0 + 25.0])


def test_an_answer_that_takes_too_long_is_handed_back_with_all_that_there_is_of_it() -> None:
    """Mutations seen to fail here: it is waited for without end; what was computed is not sent."""
    world = lent(ALWAYS, OneOpenNode)
    world.open.want(SECOND, 0.0)
    world.order(tokens=9_000, max_tokens=9_500)
    world.run(200_000.0)
    ((failed_ms, failed),) = world.heard(e.AttemptFailed)
    assert (failed_ms, failed.reason) == (FETCH_MS + SWITCH_PATIENCE_MS + 25.0, "drained")
    computed = sum(len(frame.token_ids) for _, event in world.heard(e.FramesReceived) for frame in event.frames)
    assert computed == (FETCH_MS + SWITCH_PATIENCE_MS) / 10.0
    assert world.reports()[-1] == (FETCH_MS + SWITCH_PATIENCE_MS + LOAD_MS, "second", True)


def test_files_stay_and_a_model_that_was_there_before_is_only_loaded() -> None:
    """Mutation seen to fail here: files are fetched again."""
    world = lent(ALWAYS, OneOpenNode)
    world.open.want(SECOND, 0.0)
    world.run(200_000.0)
    world.open.want(FIRST, world.now_ms)
    world.run(400_000.0)
    assert world.reports()[-2:] == [(200_000.0, "first", False), (200_000.0 + LOAD_MS, "first", True)]
    assert world.tally.fetched_bytes == SIZE_BYTES


def test_what_is_wanted_last_counts() -> None:
    """Mutation seen to fail here: the engine changes to what was wanted before."""
    world = lent(ALWAYS, OneOpenNode)
    world.open.want(SECOND, 0.0)
    world.run(10_000.0)
    world.open.want(FIRST, world.now_ms)
    world.run(500_000.0)
    assert world.reports() == [(0.0, "first", True)]
    assert world.open.wanted is None
    # In the last moment: it has stopped taking work already.
    world.open.want(SECOND, world.now_ms)
    world.order(tokens=9_000, max_tokens=9_500)
    world.run(545_000.0)
    world.open.want(FIRST, world.now_ms)
    world.run(600_000.0)
    assert world.reports()[1:] == [(540_000.0, "first", False), (545_000.0, "first", True)]
    assert len(world.heard(e.AttemptFinished)) == 1


def test_an_owner_who_comes_back_while_a_model_comes_finds_it_there_when_the_card_is_lent_again() -> None:
    """Mutation seen to fail here: the change is forgotten."""
    world = lent(LOST, OneOpenNode)
    lost_ms = 0.0
    while world.node.lent:
        lost_ms += 100.0
        world.run(lost_ms)
    # It was lost within seconds, before the files were there.
    world.open.want(SECOND, world.now_ms)
    world.run(MS_PER_HOUR / 2)
    assert world.open.digest == SECOND
    assert not any(ready for _, model, ready in world.reports() if model == "second")
    world.run(lost_ms + MS_PER_HOUR + LOAD_MS + 100.0)
    said_ms, model, ready = world.reports()[-1]
    assert (model, ready) == ("second", True)
    assert said_ms == pytest.approx(lost_ms + MS_PER_HOUR + LOAD_MS, abs=101.0)


def test_a_load_ends_when_the_owner_comes_back() -> None:
    """Mutation seen to fail here: it comes to its end in the owner's time, and is told of."""
    world = lent(LOST, OneOpenNode)
    world.open.stored.append(SECOND)
    world.open.want(SECOND, 0.0)
    while world.node.lent:
        world.run(world.now_ms + 100.0)
    assert world.now_ms < LOAD_MS
    world.run(MS_PER_HOUR / 2)
    assert [(model, ready) for _, model, ready in world.reports()] == [
        ("first", True), ("second", False), ("second", False)
    ]  # fmt: skip
