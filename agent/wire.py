"""The protocol's messages to events, and commands to the protocol's messages: one function per type, no decisions."""

from collections.abc import Sequence

from agent import events as e
from agent.assignments import AttemptKey, ask_of
from agent.owner.asks import Ask, EngineTerms
from agent.statements import pack_floats
from inference.task import PositionLogprobs, TaskId, TokenLogprob
from protos.slackwater.common.v1 import capability_pb2, completion_pb2
from protos.slackwater.node.v1 import node_service_pb2

# A Welcome may ask for heartbeats this often at most, so that a zero costs no processor.
HEARTBEAT_S_MIN = 0.05


def read_welcome(welcome: node_service_pb2.Welcome, asked_at: float) -> e.Connected:
    return e.Connected(
        asked_at=asked_at,
        cluster_id=welcome.cluster_id,
        coordinator_time_ms=welcome.coordinator_time_ms,
        heartbeat_busy_s=max(HEARTBEAT_S_MIN, welcome.heartbeat_busy_ms / 1000),
        heartbeat_idle_s=max(HEARTBEAT_S_MIN, welcome.heartbeat_idle_ms / 1000),
        frame_delay_s=welcome.frame_delay_ms / 1000,
        coordinator_keys=tuple(welcome.coordinator_public_keys),
        protocol_version=welcome.protocol_version,
    )


def read_message(response: node_service_pb2.ConnectResponse) -> e.CoordinatorEvent | None:
    """Return the event in a message; None for kinds of a later version, and for a second Welcome."""
    match response.WhichOneof("message"):
        case "assignment":
            return e.AssignmentReceived(response.assignment.header, response.assignment.chunk_count)
        case "prompt_chunk":
            chunk = response.prompt_chunk
            return e.ChunkReceived(_key(chunk), chunk.chunk_index, chunk.token_ids)
        case "cancel":
            return e.CancelReceived(_key(response.cancel))
        case "desired":
            desired = response.desired
            attempts = frozenset(_key(one) for one in desired.attempts)
            models = tuple((one.engine_id, one.manifest_digest) for one in desired.models_wanted)
            return e.DesiredReceived(desired.sequence, desired.drain, attempts, tuple(desired.engines_wanted), models)
        case "heartbeat":
            beat = response.heartbeat
            credits = e.NodeCredits(beat.credits.earned_micro, beat.credits.held_micro)
            told = beat.HasField("credits")
            return e.HeartbeatReceived(
                beat.sequence, beat.coordinator_time_ms, credits if told else None, tuple(map(_terms, beat.terms))
            )
        case "result_taken":
            return e.ResultTaken(_key(response.result_taken))
        case "challenge_waiting":
            waiting = response.challenge_waiting
            return e.ChallengeAsked(waiting.challenge_id, waiting.card_id)
        case "closing":
            return e.ClosingReceived(response.closing.reason, response.closing.detail)
        case _:
            return None


def _terms(terms: capability_pb2.EngineTerms) -> EngineTerms:
    return EngineTerms(
        engine_id=terms.engine_id,
        ask=ask_of(terms),
        most=Ask(prompt_micro=terms.most.prompt_micro, completion_micro=terms.most.completion_micro),
        refusal=terms.refusal,
    )


def _key(
    message: node_service_pb2.PromptChunk | node_service_pb2.Cancel | node_service_pb2.AttemptRef,
) -> AttemptKey:
    return AttemptKey(TaskId(message.task_id), message.attempt)


def write_command(command: e.SendCommand) -> node_service_pb2.ConnectRequest:
    """Return the message that a command asks for."""
    match command:
        case e.SendFrames():
            frames = node_service_pb2.FrameBatch(frames=[_frame(frame) for frame in command.frames])
            return node_service_pb2.ConnectRequest(frames=frames)
        case e.SendHeartbeat():
            heartbeat = node_service_pb2.AgentHeartbeat(sequence=command.sequence)
            return node_service_pb2.ConnectRequest(heartbeat=heartbeat)
        case e.SendState():
            return node_service_pb2.ConnectRequest(state=_state(command))
        case e.SendFinished():
            return node_service_pb2.ConnectRequest(ended=_finished(command))
        case e.SendFailed():
            ended = node_service_pb2.AttemptEnded(
                task_id=command.key.task_id,
                attempt=command.key.attempt,
                failed=node_service_pb2.AttemptFailed(reason=command.reason, detail=command.detail),
            )
            return node_service_pb2.ConnectRequest(ended=ended)
        case e.SendRefused():
            refused = node_service_pb2.AssignmentRefused(
                task_id=command.key.task_id,
                attempt=command.key.attempt,
                reason=command.reason,
                detail=command.detail,
            )
            return node_service_pb2.ConnectRequest(refused=refused)


def _frame(frame: e.FrameData) -> node_service_pb2.Frame:
    return node_service_pb2.Frame(
        task_id=frame.key.task_id,
        attempt=frame.key.attempt,
        first_index=frame.first_index,
        token_ids=frame.token_ids,
        logprobs=_positions(frame.logprobs) if frame.logprobs else None,
    )


def _state(command: e.SendState) -> node_service_pb2.NodeState:
    return node_service_pb2.NodeState(
        sequence=command.sequence,
        host=command.host,
        gpus=command.gpus,
        engines=command.engines,
        running=[node_service_pb2.AttemptRef(task_id=key.task_id, attempt=key.attempt) for key in command.running],
        draining=command.draining,
        models=command.models,
    )


def _finished(command: e.SendFinished) -> node_service_pb2.AttemptEnded:
    return node_service_pb2.AttemptEnded(
        task_id=command.key.task_id,
        attempt=command.key.attempt,
        finished=node_service_pb2.AttemptFinished(
            statement=command.statement,
            embedding=pack_floats(command.embedding),
            scores=_positions(command.scores),
            header=command.header,
        ),
    )


def _positions(positions: Sequence[PositionLogprobs]) -> list[completion_pb2.PositionLogprobs]:
    return [
        completion_pb2.PositionLogprobs(chosen=_logprob(one.chosen), top=[_logprob(other) for other in one.top])
        for one in positions
    ]


def _logprob(one: TokenLogprob) -> completion_pb2.TokenLogprob:
    return completion_pb2.TokenLogprob(token_id=one.token_id, logprob=one.logprob, rank=one.rank)
