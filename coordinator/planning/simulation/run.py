"""A fleet in virtual time: the real scheduler, failover and settlement, with simulated nodes, owners and tenants.

One heap of what is to happen; the clock jumps from one to the next. Everything
is drawn from one seed, each purpose from a generator of its own, so that two
policies, or two churns, are held against the same arrivals.

The scheduler's own limits stand but for those that watch heartbeats and frames,
which are folded here (`node.py`): silence and stalls would be seen where a real
node speaks every second. A node that vanishes is therefore disconnected after
the silence in which the scheduler would have missed it. Ticks come every second
and not ten times: they look at waits of ten seconds and more.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final, assert_never

from coordinator.fleet import churn as histories
from coordinator.fleet.week_counts import HOUR_S
from coordinator.ledger.asks import Asks
from coordinator.ledger.prices import Terms
from coordinator.ledger.settlement import EndedAttempt, EndedTask
from coordinator.planning.curves import EngineCurve
from coordinator.planning.hardware import MODELS
from coordinator.planning.simulation.arrivals import Arrival, poisson, read_trace
from coordinator.planning.simulation.books import TENANT, Settlements
from coordinator.planning.simulation.capacity import rates_of
from coordinator.planning.simulation.churn import MS_PER_HOUR, Churn, one_way_ms
from coordinator.planning.simulation.node import Node, Tally
from coordinator.planning.simulation.open_node import OpenNode, Runnable
from coordinator.planning.simulation.outcome import ANSWERED, Outcome, Sample
from coordinator.planning.simulation.placements import LOOK_MS, LOOK_SOON_MS, Placements
from coordinator.planning.simulation.scenario import (
    Fleet,
    Scenario,
    ScenarioInvalid,
    Target,
    curves_of,
    digest_of,
    models_of,
)
from coordinator.planning.simulation.token_ids import STOP_ID, VOCABULARY_SIZE, prompt_ids
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.state import Scheduler
from inference.task import ManifestDigest, NodeId, OwnerId, PrivacyClass, Sampling, TaskId, TaskKind, TaskSpec

TICK_MS: Final = 1000.0
SAMPLES: Final = 240
# What is not answered so long after the last request came is told as unfinished.
DRAIN_HOURS_MAX: Final = 24.0
# A Monday, from which the churn model counts; as Unix time.
MONDAY_S: Final = 4 * 86_400.0
UNFINISHED: Final = "unfinished"
GREEDY: Final = Sampling(temperature=0.0)

MakeScheduler = Callable[[Limits, Asks], Scheduler]


def folded(limits: Limits) -> Limits:
    """Return limits for nodes that neither send heartbeats nor stream, and for a clock that jumps."""
    return replace(limits, silence_busy_s=math.inf, stall_s=math.inf, stall_alone_s=math.inf, sleep_gap_s=math.inf)


def plain_scheduler(limits: Limits, asks: Asks) -> Scheduler:
    return Scheduler(limits, asks, first_lease_epoch=1)


@dataclass(slots=True)
class _Live:
    """A task that has not ended."""

    number: int
    arrival: Arrival
    attempts: list[EndedAttempt] = field(default_factory=list)


class Simulation:
    """One run; `run` once.

    Args:
        curves: in the order of the scenario's fleet.
        arrivals: in order of time.
        make_scheduler: for another policy.
        limits: as they would be in a real fleet.
    """

    def __init__(
        self,
        scenario: Scenario,
        curves: list[EngineCurve],
        arrivals: Iterator[Arrival],
        *,
        make_scheduler: MakeScheduler = plain_scheduler,
        limits: Limits | None = None,
        terms: Terms | None = None,
    ) -> None:
        self.scenario = scenario
        terms = terms or Terms()
        asks = Asks(terms)
        for model in scenario.models():
            asks.add_model(digest_of(model), model)
        self.scheduler = make_scheduler(folded(limits or Limits()), asks)
        self.churn = Churn(scenario.seed, scenario.start_hour)
        self._began_s = MONDAY_S + scenario.start_hour * HOUR_S
        # What a coordinator learns of the owners, which it does not know.
        self._histories = histories.Churn(self._began_s)
        self.outcome = Outcome()
        self.settlements = Settlements(terms)
        self.tallies = [Tally() for _ in scenario.fleet]
        self.now_ms = 0.0
        self.events = 0
        self._arrivals = arrivals
        self._horizon_ms = scenario.hours * MS_PER_HOUR
        self._arriving = True
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._live: dict[TaskId, _Live] = {}
        self._connections: dict[e.ConnectionId, Node] = {}
        self._connected = 0
        self._nodes = self._make_nodes(curves)
        self._by_id = {node.node_id: node for node in self._nodes}
        self._placements: Placements | None = None
        # When somebody last asked for what is ready nowhere, and was not the second in a moment.
        self._looks_at_ms = -math.inf
        if any(fleet.open for fleet in scenario.fleet):
            sizes_bytes = {digest_of(model): _size_bytes(model) for model in scenario.models()}
            self._placements = Placements(self._nodes, sizes_bytes, self.scheduler, self._histories)

    def run(self, progress: Callable[[float, int], None] | None = None) -> None:
        """Let all requests come and end.

        Args:
            progress: told now and then which share of the time has passed, and how many tasks have come.
        """
        for node in self._nodes:
            node.join(0.0)
        self._next_arrival()
        self.schedule(TICK_MS, self._tick, TICK_MS, progress)
        self._expect_losses(0.0)
        if self._placements is not None:
            self._look_again(self._placements, 0.0)
        every_ms = self._horizon_ms / SAMPLES
        self.schedule(every_ms, self._sample, every_ms, every_ms)
        heap, end_ms = self._heap, self._horizon_ms + DRAIN_HOURS_MAX * MS_PER_HOUR
        while (self._arriving or self._live) and self.now_ms < end_ms:
            self.now_ms, _, action, arguments = heapq.heappop(heap)
            self.events += 1
            action(*arguments)
        for live in self._live.values():
            self.outcome.end(live.number, self.now_ms, UNFINISHED, 0)
        for node in self._nodes:
            node.leave(self.now_ms)

    # --- the world of nodes --------------------------------------------------------------------

    def schedule(self, at_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._heap, (at_ms, self._scheduled, action, arguments))

    def lent(self, node: Node) -> None:
        self._histories.handle(histories.CameBack(node.node_id, self._now_s))
        losses_per_h = self._histories.losses_per_h(node.node_id, self._now_s)
        self.tell(e.StayExpected(node.node_id, losses_per_h))

    def lost(self, node: Node, *, crashed: bool) -> None:
        reason = histories.Departure.DISCONNECTED if crashed else histories.Departure.OWNER_RETURNED
        self._histories.handle(histories.WentAway(node.node_id, self._now_s, reason))

    def connect(self, node: Node) -> e.ConnectionId:
        self._connections.pop(node.connection_id, None)
        self._connected += 1
        connection_id = e.ConnectionId(self._connected)
        self._connections[connection_id] = node
        return connection_id

    def tell(self, event: e.Event) -> None:
        for command in self.scheduler.handle(event, self.now_ms / 1000.0):
            self._carry_out(command)

    def _make_nodes(self, curves: list[EngineCurve]) -> list[Node]:
        random = Random(f"{self.scenario.seed}/network")
        nodes: list[Node] = []
        for fleet, curve, tally in zip(self.scenario.fleet, curves, self.tallies, strict=True):
            models = self._models_of(fleet, curve) if fleet.open else None
            for _ in range(fleet.nodes):
                delay_ms = one_way_ms(self.scenario.network, random)
                if models is None:
                    nodes.append(Node(len(nodes), fleet, curve, delay_ms, tally, self))
                else:
                    nodes.append(OpenNode(len(nodes), fleet, models, delay_ms, tally, self))
        return nodes

    def _models_of(self, fleet: Fleet, curve: EngineCurve) -> dict[ManifestDigest, Runnable]:
        curves = {**models_of(self.scenario, fleet), fleet.model: curve}
        return {digest_of(model): Runnable(one, _size_bytes(model)) for model, one in curves.items()}

    # --- which models they hold ------------------------------------------------------------------

    def _look_again(self, placements: Placements, at_ms: float) -> None:
        self._look(placements)
        self.schedule(at_ms + LOOK_MS, self._look_again, placements, at_ms + LOOK_MS)

    def _look_soon(self, placements: Placements) -> None:
        if self._looks_at_ms <= self.now_ms - LOOK_SOON_MS:
            self._looks_at_ms = self.now_ms
            self.schedule(self.now_ms + LOOK_SOON_MS, self._look, placements)

    def _look(self, placements: Placements) -> None:
        for event in placements.look(self.now_ms, self._now_s):
            self.tell(event)

    def _have_models(self, command: c.SendDesired) -> None:
        node = self._connections.get(command.connection_id)
        if isinstance(node, OpenNode):
            at_ms = self.now_ms + node.delay_ms
            for _, digest in command.models_wanted:
                self.schedule(at_ms, node.want, digest, at_ms)

    # --- tenants -------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        most = self.scenario.tasks_max
        if arrival is None or arrival.at_ms > self._horizon_ms or (most is not None and len(self.outcome) >= most):
            self._arriving = False
        else:
            self.schedule(arrival.at_ms, self._submit, arrival)

    def _submit(self, arrival: Arrival) -> None:
        number = self.outcome.submit(arrival)
        task_id = TaskId(f"task-{number}")
        target = self.scenario.targets.get(arrival.service_class, Target())
        self._live[task_id] = _Live(number, arrival)
        digest, placements = digest_of(arrival.model), self._placements
        cold = placements is not None and placements.asked(digest, arrival.max_tokens, self.now_ms)
        self.tell(
            e.TaskSubmitted(
                TaskSpec(
                    task_id=task_id,
                    tenant_id=TENANT,
                    kind=TaskKind.GENERATE,
                    model=arrival.model,
                    manifest_digest=digest,
                    prompt_ids=prompt_ids(arrival.prompt_tokens, number),
                    sampling=GREEDY,
                    max_tokens=arrival.max_tokens,
                    stop_token_ids=(STOP_ID,),
                    vocabulary_size=VOCABULARY_SIZE,
                    service_class=arrival.service_class,
                    privacy_class=PrivacyClass.PUBLIC,
                    streaming=True,
                    deadline_s=arrival.deadline_s,
                    max_ttft_ms=None if target.first_token_ms is None else round(target.first_token_ms),
                )
            )
        )
        if placements is not None and cold:
            self._look_soon(placements)
        self._next_arrival()

    # --- the coordinator's driver ----------------------------------------------------------------

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Deliver():
                self.outcome.deliver(self._live[command.task_id].number, self.now_ms)
            case c.Assign():
                node = self._by_id[command.node_id]
                at_ms = self.now_ms + node.delay_ms
                tokens = self._live[command.spec.task_id].arrival.answer_tokens
                self.schedule(at_ms, node.take, command, tokens, at_ms)
            case c.RecordAttempt():
                self._record(command)
            case c.CompleteTask():
                self._end(command.task_id, ANSWERED, command.finish_reason.value, command.completion_tokens)
            case c.FailTask():
                fate = command.failure.value
                self._end(command.task_id, fate, fate, command.completion_tokens)
            case c.CancelAttempt():
                if command.connection_id in self._connections:
                    node = self._connections[command.connection_id]
                    at_ms = self.now_ms + node.delay_ms
                    self.schedule(at_ms, node.cancel, command.connection_id, command.task_id, command.attempt, at_ms)
            case c.Discard():
                live = self._live[command.task_id]
                self.outcome.discard(live.number, sum(one.delivered_tokens for one in live.attempts))
            case c.SendDesired():
                self._have_models(command)
            case c.CloseConnection():
                # Nobody breaks the protocol here.
                pass
            case _:
                assert_never(command)

    def _record(self, command: c.RecordAttempt) -> None:
        live = self._live[command.task_id]
        self.outcome.attempt_ended(live.number, self.now_ms, command.node_id, command.outcome, command.delivered_tokens)
        live.attempts.append(
            EndedAttempt(
                attempt=command.attempt,
                node_id=command.node_id,
                owner_id=_owner_of(command.node_id),
                first_index=command.first_index,
                delivered_tokens=command.delivered_tokens,
                outcome=command.outcome,
                # Who finishes signs.
                statement_sha256="simulated" if command.outcome == "finished" else "",
                ask=command.ask,
            )
        )

    def _end(self, task_id: TaskId, fate: str, outcome: str, tokens: int) -> None:
        live = self._live.pop(task_id)
        self.outcome.end(live.number, self.now_ms, fate, tokens)
        arrival = live.arrival
        if self._placements is not None and fate == ANSWERED:
            self._placements.answered(digest_of(arrival.model), tokens)
        ended = EndedTask(
            outcome=outcome,
            prompt_tokens=arrival.prompt_tokens,
            completion_tokens=tokens,
            ended_at_ms=round(self.now_ms),
            attempts=live.attempts,
        )
        self.settlements.settle(task_id, arrival.model, arrival.max_tokens, ended)

    # --- what is to be expected of owners --------------------------------------------------------

    @property
    def _now_s(self) -> float:
        """The Unix time that the churn model is told."""
        return self._began_s + self.now_ms / 1000.0

    def _expect_losses(self, at_ms: float) -> None:
        self.tell(e.LossesExpected(self._histories.lost_share(histories.RELOAD_S, self._now_s)))
        self.schedule(at_ms + MS_PER_HOUR, self._expect_losses, at_ms + MS_PER_HOUR)

    # --- time ----------------------------------------------------------------------------------

    def _tick(self, at_ms: float, progress: Callable[[float, int], None] | None) -> None:
        if self._live:
            self.tell(e.Ticked())
        if progress is not None:
            progress(min(1.0, at_ms / self._horizon_ms), len(self.outcome))
        self.schedule(at_ms + TICK_MS, self._tick, at_ms + TICK_MS, progress)

    def _sample(self, at_ms: float, every_ms: float) -> None:
        queued = len(self.scheduler.queue)
        lent = sum(tally.lent for tally in self.tallies)
        self.outcome.samples.append(Sample(at_ms, lent, len(self._live) - queued, queued))
        self.schedule(at_ms + every_ms, self._sample, at_ms + every_ms, every_ms)


def simulation_of(
    scenario: Scenario, trace: Path | None = None, *, make_scheduler: MakeScheduler = plain_scheduler
) -> Simulation:
    """Return the run of a scenario, with the requests of a trace in place of its loads where there is one.

    Raises:
        ScenarioInvalid: the scenario cannot be run; or, while it runs, a line of the trace is wrong.
    """
    curves = curves_of(scenario)
    if trace is None and not scenario.load:
        raise ScenarioInvalid("the scenario has no [[load]]; add one, or give a trace")
    if trace is None:
        arrivals = poisson(scenario.load, rates_of(scenario, curves), scenario.seed)
    else:
        rooms: dict[str, int] = {}
        for fleet in scenario.fleet:
            for model, curve in models_of(scenario, fleet).items():
                rooms[model] = min(curve.kv_tokens_max, rooms.get(model, curve.kv_tokens_max))
        arrivals = read_trace(trace, rooms)
    return Simulation(scenario, curves, arrivals, make_scheduler=make_scheduler)


def _size_bytes(model: str) -> int:
    return round(MODELS[model].weight_bytes)


def _owner_of(node_id: NodeId) -> OwnerId:
    return OwnerId(node_id.replace("node-", "owner-"))
