"""One simulated node: what an agent says and does, with an engine that follows a curve and an owner who comes back.

Folded, so that a run costs a few events per answer: no heartbeats, and of an
answer's frames the first, and one with all that is left at its end or when it
is lost. A node flushes its frames every few milliseconds; so what it had
computed when it was lost counts as received. Its messages all take the same
time, and arrive in the order in which they were sent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.planning.curves import EngineCurve
from coordinator.planning.simulation.churn import Churn
from coordinator.planning.simulation.engine import Engine, Happening, What
from coordinator.planning.simulation.scenario import Fleet
from coordinator.planning.simulation.token_ids import answer_ids
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from inference.task import EngineId, FinishReason, NodeId, OwnerId, TaskId

ENGINE_ID = EngineId("engine")
# Of a node that has work; as in coordinator.scheduler.policy.Limits, which the simulation does not use for this.
HEARTBEAT_S = 1.0
SILENCE_BUSY_S = 2.4
# When keepalive gives up on the connection of a node without work.
SILENCE_IDLE_S = 30.0


class World(Protocol):
    """Where a node lives."""

    churn: Churn

    def schedule(self, at_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have something done at a time that is not past."""
        ...

    def tell(self, event: e.Event) -> None:
        """Let the scheduler take an event now."""
        ...

    def lent(self, node: "Node") -> None:
        """Take note that a node's engine is lent from now on."""
        ...

    def lost(self, node: "Node", *, crashed: bool) -> None:
        """Take note that it is not lent any more."""
        ...

    def connect(self, node: "Node") -> e.ConnectionId:
        """Return the id of a new connection, which is the node's from now on."""
        ...


@dataclass(slots=True)
class Tally:
    """What equal nodes did, in sums."""

    lent_ms: float = 0.0
    busy_ms: float = 0.0
    prefilled_tokens: int = 0
    preemptions: int = 0
    losses: int = 0
    crashes: int = 0
    # Up now.
    lent: int = 0
    # From one model to another, and what was downloaded for it.
    model_changes: int = 0
    fetched_bytes: int = 0


@dataclass(slots=True, eq=False)
class Running:
    """An attempt on this node. Args: `tokens` are those of the answer that are left when it begins."""

    task_id: TaskId
    number: int
    first_index: int
    tokens: int
    stopped: bool
    sent: int = 0


class Node:
    """A machine of a fleet. `lent` says whether its engine is up."""

    __slots__ = (
        "_attempts", "_back_ms", "_delay_ms", "_engine", "_lent_since_ms", "_tally", "_time_zone", "_wake_ms", "_world",
        "connected", "connection_id", "curve", "digest", "fleet", "lent", "node_id", "owner_id",
    )  # fmt: skip

    def __init__(
        self, number: int, fleet: Fleet, curve: EngineCurve, delay_ms: float, tally: Tally, world: World
    ) -> None:
        self.node_id = NodeId(f"node-{number:07d}")
        self.owner_id = OwnerId(f"owner-{number:07d}")
        self.fleet = fleet
        # Of the model that it has.
        self.digest = fleet.digest
        self.curve = curve
        # Both ways; back with what the engine's host adds.
        self._delay_ms = delay_ms
        self._back_ms = delay_ms + curve.request_ms
        self._tally = tally
        self._world = world
        self._time_zone = world.churn.time_zone(fleet.owners)
        self.connection_id = e.ConnectionId(0)
        self.connected = False
        self.lent = False
        self._lent_since_ms = 0.0
        # Made with its first attempt: most nodes of a large fleet have nothing to do.
        self._engine: Engine[Running] | None = None
        self._attempts: dict[TaskId, Running] = {}
        self._wake_ms = math.inf

    # --- the owner ---------------------------------------------------------------------------

    def join(self, at_ms: float) -> None:
        """Connect, with the engine up or still to come."""
        away_ms = self._world.churn.away_at_start_ms(self.fleet.owners)
        self._connect(at_ms)
        if away_ms:
            self._report(at_ms)
            self._world.schedule(at_ms + away_ms, self._lend, at_ms + away_ms)
        else:
            self._lend(at_ms)

    @property
    def ready(self) -> bool:
        """Whether its engine takes work."""
        return self.lent

    def leave(self, at_ms: float) -> None:
        """Add what is still open to the tally, at the end of a run."""
        if self.lent:
            self._end_lending(at_ms)

    def _lend(self, at_ms: float) -> None:
        owners = self.fleet.owners
        if not self.connected:
            self._connect(at_ms)
        self.lent = True
        self._tally.lent += 1
        self._lent_since_ms = at_ms
        self._report(at_ms)
        self._world.lent(self)
        lost_ms = at_ms + self._world.churn.lent_ms(owners, at_ms, self._time_zone)
        if lost_ms < math.inf:
            self._world.schedule(lost_ms, self._lose, lost_ms)

    def _lose(self, at_ms: float) -> None:
        churn, owners = self._world.churn, self.fleet.owners
        crashed = churn.is_crash(owners)
        self._advance(at_ms)
        if crashed:
            self._tally.crashes += 1
            for running in self._attempts.values():
                self._send_frames(running, at_ms)
            self._vanish(at_ms)
            self._attempts.clear()
        else:
            self._tally.losses += 1
            self._hand_back("owner_returned", at_ms)
        self._end_lending(at_ms)
        self._world.lost(self, crashed=crashed)
        if not crashed:
            self._report(at_ms)
        back_ms = at_ms + churn.away_ms(owners) + 1000.0 * owners.reload_s
        self._world.schedule(back_ms, self._lend, back_ms)

    def _hand_back(self, reason: str, at_ms: float) -> None:
        for running in self._attempts.values():
            self._send_frames(running, at_ms)
        for running in self._attempts.values():
            self._fail(running.task_id, running.number, reason, at_ms)
        self._attempts.clear()

    def _vanish(self, at_ms: float) -> None:
        silence_s = self._world.churn.silence_s(HEARTBEAT_S, SILENCE_BUSY_S) if self._attempts else SILENCE_IDLE_S
        self.connected = False
        self._notice_silence(at_ms + max(1000.0 * silence_s, self._back_ms))

    def _notice_silence(self, at_ms: float) -> None:
        self._world.schedule(at_ms, self._world.tell, e.NodeDisconnected(self.node_id, self.connection_id))

    def _end_lending(self, at_ms: float) -> None:
        self.lent = False
        self._tally.lent -= 1
        self._tally.lent_ms += at_ms - self._lent_since_ms
        self._stop_engine(at_ms)

    def _stop_engine(self, at_ms: float) -> None:
        tally, engine = self._tally, self._engine
        if engine is not None:
            tally.busy_ms += engine.busy_ms_until(at_ms)
            tally.prefilled_tokens += engine.prefilled_tokens
            tally.preemptions += engine.preemptions
        self._engine = None
        self._wake_ms = math.inf

    # --- orders ------------------------------------------------------------------------------

    def take(self, order: c.Assign, answer_tokens: int, at_ms: float) -> None:
        """Begin an attempt. Args: `answer_tokens` of the whole answer, which only its engine finds out."""
        if order.connection_id != self.connection_id:
            return
        if not self.connected:
            # Nothing answers: from its first order on a node owes a word.
            self._notice_silence(at_ms + 1000.0 * SILENCE_BUSY_S)
            return
        if not self.ready:
            self._fail(order.spec.task_id, order.attempt, "refused_engine_not_ready", at_ms)
            return
        running = Running(
            task_id=order.spec.task_id,
            number=order.attempt,
            first_index=order.first_index,
            tokens=answer_tokens - order.first_index,
            stopped=answer_tokens < order.spec.max_tokens,
        )
        if self._engine is None:
            self._engine = Engine(self.curve)
        self._attempts[running.task_id] = running
        self._engine.submit(running, len(order.prompt_ids), running.tokens, at_ms)
        self._advance(at_ms)

    def cancel(self, connection_id: e.ConnectionId, task_id: TaskId, number: int, at_ms: float) -> None:
        """Give an attempt up, unless it is over."""
        running = self._attempts.get(task_id)
        if connection_id != self.connection_id or running is None or running.number != number:
            return
        assert self._engine is not None, "an attempt runs on an engine"
        self._engine.cancel(running, at_ms)
        del self._attempts[task_id]
        self._advance(at_ms)

    # --- the engine --------------------------------------------------------------------------

    def _wake(self, at_ms: float) -> None:
        # Whoever came in between has set another time.
        if at_ms == self._wake_ms:
            self._wake_ms = math.inf
            self._advance(at_ms)

    def _advance(self, at_ms: float) -> None:
        engine = self._engine
        if engine is None:
            return
        for happening in engine.advance(at_ms):
            self._say(happening)
        if engine.next_ms < self._wake_ms:
            self._wake_ms = engine.next_ms
            self._world.schedule(self._wake_ms, self._wake, self._wake_ms)

    def _say(self, happening: Happening[Running]) -> None:
        at_ms, what, running = happening
        if self._attempts.get(running.task_id) is not running:
            # It was cancelled in the step in which it ended.
            return
        if what is What.FIRST_TOKEN:
            # One that ends with it is told of in a moment.
            if running.tokens > 1:
                self._send(self._frames(running, 1), at_ms)
            return
        frames = self._frames(running, running.tokens)
        finished = e.AttemptFinished(
            node_id=self.node_id,
            connection_id=self.connection_id,
            task_id=running.task_id,
            attempt=running.number,
            token_ids=answer_ids(running.tokens, running.stopped),
            finish_reason=FinishReason.STOP if running.stopped else FinishReason.LENGTH,
            statement=None,
        )
        del self._attempts[running.task_id]
        self._send(frames, at_ms)
        self._send(finished, at_ms)

    # --- messages ----------------------------------------------------------------------------

    @property
    def delay_ms(self) -> float:
        """How long an order takes to this node."""
        return self._delay_ms

    def _send(self, event: e.Event, at_ms: float) -> None:
        self._world.schedule(at_ms + self._back_ms, self._world.tell, event)

    def _send_frames(self, running: Running, at_ms: float) -> None:
        """Send what of an attempt is there and was not sent."""
        assert self._engine is not None, "an attempt runs on an engine"
        tokens = self._engine.tokens(running, at_ms)
        if tokens > running.sent:
            self._send(self._frames(running, tokens), at_ms)

    def _frames(self, running: Running, tokens: int) -> e.FramesReceived:
        ends = running.stopped and tokens == running.tokens
        ids = answer_ids(tokens - running.sent, ends)
        frame = e.Frame(running.task_id, running.number, running.first_index + running.sent, ids)
        running.sent = tokens
        return e.FramesReceived(self.node_id, self.connection_id, (frame,))

    def _fail(self, task_id: TaskId, number: int, reason: str, at_ms: float) -> None:
        self._send(
            e.AttemptFailed(
                node_id=self.node_id,
                connection_id=self.connection_id,
                task_id=task_id,
                attempt=number,
                reason=reason,
            ),
            at_ms,
        )

    def _connect(self, at_ms: float) -> None:
        self.connected = True
        self.connection_id = self._world.connect(self)
        self._send(
            e.NodeConnected(
                node_id=self.node_id,
                connection_id=self.connection_id,
                owner_id=self.owner_id,
                trusted=False,
                draining=False,
                boot_started_at_ms=round(at_ms),
                stream_number=0,
            ),
            at_ms,
        )

    def _report(self, at_ms: float) -> None:
        curve, fleet = self.curve, self.fleet
        engine = e.EngineView(
            engine_id=ENGINE_ID,
            manifest_digest=self.digest,
            sampler_profile="simulated",
            ready=self.ready,
            slots=fleet.slots_of(curve),
            # Of one answer, alone.
            tokens_per_second=1000.0 / curve.step_ms(1, 0),
            ask=fleet.price,
        )
        running = frozenset((one.task_id, one.number) for one in self._attempts.values())
        self._send(
            e.NodeReported(
                node_id=self.node_id,
                connection_id=self.connection_id,
                engines=(engine,),
                accepting=True,
                running=running,
            ),
            at_ms,
        )
