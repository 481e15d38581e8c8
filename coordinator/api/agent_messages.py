"""What an agent says, turned into scheduler events and registry reports: one method per kind of message."""

import math
from collections.abc import Callable

import structlog

from coordinator.api.asks import ask_of, terms_to_wire
from coordinator.api.completion import logprobs_from_wire
from coordinator.clock import Clock
from coordinator.fleet.registry import REPORTED_RUNNING_MAX, FleetRegistry
from coordinator.ledger.asks import Asks
from coordinator.ledger.holdback import Credits
from coordinator.scheduler import events as e
from coordinator.scheduler.driver import AgentConnection, SchedulerDriver
from inference.task import EngineId, ManifestDigest, NodeId, TaskId
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire

REFUSAL_NAMES = {
    value: f"refused_{name.removeprefix('REFUSAL_REASON_').lower()}" for name, value in wire.RefusalReason.items()
}
FAILURE_NAMES = {value: name.removeprefix("FAILURE_REASON_").lower() for name, value in wire.FailureReason.items()}

# Frames of one batch. An agent merges the frames of an attempt, so there are no more than it can run.
BATCH_FRAMES_MAX = REPORTED_RUNNING_MAX
# Of an explanation by an agent, which it may have made as long as a message.
LOGGED_CHARACTERS_MAX = 200

log = structlog.get_logger()


class ProtocolViolation(Exception):
    """The agent sent what the protocol does not allow; the message says what."""


class AgentMessages:
    """Args: `credits` tells what a node has earned."""

    def __init__(
        self,
        driver: SchedulerDriver,
        registry: FleetRegistry,
        clock: Clock,
        credits: Callable[[NodeId], Credits],
        asks: Asks,
    ) -> None:
        self._driver = driver
        self._registry = registry
        self._clock = clock
        self._credits = credits
        self._asks = asks

    def take(self, connection: AgentConnection, request: wire.ConnectRequest) -> None:
        """Act on one message of an agent.

        Raises:
            ProtocolViolation, SlackwaterError: the message is none that an agent may send.
        """
        match request.WhichOneof("message"):
            case "frames":
                self._take_frames(connection, request.frames)
            case "heartbeat":
                self._driver.feed(e.NodeHeard(connection.node_id, connection.connection_id))
                self._registry.heard(connection.node_id, self._clock.now_ms())
                credits = self._credits(connection.node_id)
                view = self._registry.find(connection.node_id)
                reply = wire.CoordinatorHeartbeat(
                    sequence=request.heartbeat.sequence,
                    coordinator_time_ms=self._clock.now_ms(),
                    credits=wire.NodeCredits(earned_micro=credits.earned_micro, held_micro=credits.held_micro),
                    terms=[terms_to_wire(terms) for terms in view.terms] if view else (),
                )
                connection.send(wire.ConnectResponse(heartbeat=reply))
            case "state":
                self._take_state(connection, request.state)
            case "ended":
                self._take_end(connection, request.ended)
            case "refused":
                refused = request.refused
                reason = REFUSAL_NAMES.get(refused.reason, "refused")
                self._fail(connection, refused.task_id, refused.attempt, reason, refused.detail)
            case "hello":
                raise ProtocolViolation("a second Hello on one stream")
            case _:
                raise ProtocolViolation("an empty or unknown message")

    def _take_frames(self, connection: AgentConnection, batch: wire.FrameBatch) -> None:
        if len(batch.frames) > BATCH_FRAMES_MAX:
            raise ProtocolViolation(f"{len(batch.frames)} frames in one batch, at most {BATCH_FRAMES_MAX} are taken")
        frames = []
        for frame in batch.frames:
            logprobs = logprobs_from_wire(frame.logprobs) if frame.logprobs else ()
            if logprobs and len(logprobs) != len(frame.token_ids):
                raise ProtocolViolation(f"{len(frame.token_ids)} ids with {len(logprobs)} logprobs in one frame")
            task_id, token_ids = TaskId(frame.task_id), tuple(frame.token_ids)
            frames.append(e.Frame(task_id, frame.attempt, frame.first_index, token_ids, logprobs))
        self._driver.feed(e.FramesReceived(connection.node_id, connection.connection_id, frames))

    def _take_state(self, connection: AgentConnection, state: wire.NodeState) -> None:
        engines = tuple(_engine_view(engine) for engine in state.engines)
        if len({engine.engine_id for engine in engines}) != len(engines):
            raise ProtocolViolation("two engines with one id")
        self._registry.reported(connection.node_id, state, self._clock.now_ms(), tuple(self._asks.terms(engines)))
        self._registry.set_running(connection.node_id, len(state.running))
        self._driver.feed(
            e.NodeReported(
                node_id=connection.node_id,
                connection_id=connection.connection_id,
                engines=engines,
                accepting=not state.draining,
                running=frozenset((TaskId(running.task_id), running.attempt) for running in state.running),
            )
        )

    def _take_end(self, connection: AgentConnection, ended: wire.AttemptEnded) -> None:
        match ended.WhichOneof("outcome"):
            case "finished":
                self._driver.finish_attempt(connection, ended)
            case "failed":
                reason = FAILURE_NAMES.get(ended.failed.reason, "unspecified")
                self._fail(connection, ended.task_id, ended.attempt, reason, ended.failed.detail)
            case _:
                raise ProtocolViolation("an AttemptEnded without an outcome")

    def _fail(self, connection: AgentConnection, task_id: str, attempt: int, reason: str, detail: str) -> None:
        if self._driver.runs(connection, TaskId(task_id), attempt):
            # Of anything else the news are late, an answer to a Cancel as a rule, or invented.
            log.info(
                "attempt_failed",
                node=connection.node_id,
                task=task_id,
                attempt=attempt,
                reason=reason,
                detail=detail[:LOGGED_CHARACTERS_MAX],
            )
        self._driver.feed(
            e.AttemptFailed(
                node_id=connection.node_id,
                connection_id=connection.connection_id,
                task_id=TaskId(task_id),
                attempt=attempt,
                reason=reason,
            )
        )


def _engine_view(engine: capability_pb2.Engine) -> e.EngineView:
    if not engine.engine_id or not 0 <= engine.tokens_per_second < math.inf:
        raise ProtocolViolation("an engine without an id, or with a speed that is no number")
    return e.EngineView(
        engine_id=EngineId(engine.engine_id),
        manifest_digest=ManifestDigest(engine.manifest_digest),
        sampler_profile=engine.sampler_profile,
        ready=engine.status == capability_pb2.ENGINE_STATUS_READY,
        slots=engine.slots,
        tokens_per_second=engine.tokens_per_second,
        unloaded=engine.status == capability_pb2.ENGINE_STATUS_UNLOADED,
        starting=engine.status == capability_pb2.ENGINE_STATUS_STARTING,
        ask=ask_of(engine),
        heard=_heard(engine) if engine.HasField("open") else None,
    )


def _heard(engine: capability_pb2.Engine) -> frozenset[ManifestDigest]:
    """Return the models of which an open engine knows what is wanted."""
    refused = (ManifestDigest(one.manifest_digest) for one in engine.open.refusals)
    return frozenset((ManifestDigest(engine.open.wanted_digest or engine.manifest_digest), *refused))
