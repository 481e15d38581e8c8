"""Attempts as the agent sees them, and their ids on the way out. Pure, and changed by `agent.state` only."""

from array import array
from enum import Enum

from agent import events as e
from agent.assignments import TaskOrder
from agent.energy.meter import NO_ENERGY
from agent.prompt_assembly import PromptAssembly
from inference.engine import TokenChunk
from inference.task import FinishReason, PositionLogprobs, token_array
from protos.slackwater.common.v1 import capability_pb2

# Silence after the first id that makes a sequence suspect: long for an engine, short for a reader.
STALL_S = 2.0
# An engine may be slow by nature: so many of the sequence's own mean gaps must have passed as well.
STALL_GAPS = 10


class Phase(Enum):
    RECEIVING = "receiving"
    RUNNING = "running"
    SIGNING = "signing"


class Attempt:
    """A checked order and what became of it so far."""

    __slots__ = (
        "assigned_at",
        "embedding",
        "energy",
        "engine_id",
        "finish_reason",
        "first_id_at",
        "last_id_at",
        "nonce_durable",
        "order",
        "output_ids",
        "pending_ids",
        "pending_logprobs",
        "phase",
        "prompt",
        "scores",
    )

    def __init__(self, order: TaskOrder, engine_id: str, now: float) -> None:
        self.order = order
        self.engine_id = engine_id
        self.prompt = PromptAssembly(order)
        self.phase = Phase.RECEIVING
        self.nonce_durable = False
        self.assigned_at = now
        self.first_id_at: float | None = None
        self.last_id_at = now
        self.output_ids: array[int] = token_array(())
        self.pending_ids: list[int] = []
        self.pending_logprobs: list[PositionLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.energy = NO_ENERGY
        self.embedding: tuple[float, ...] = ()
        self.scores: tuple[PositionLogprobs, ...] = ()

    def suspect(self, now: float) -> bool:
        """Whether the sequence began and then stopped advancing. A long prefill is no stall."""
        if self.phase is not Phase.RUNNING or self.first_id_at is None:
            return False
        gaps = max(1, len(self.output_ids) - 1)
        mean_gap_s = (self.last_id_at - self.first_id_at) / gaps
        return now - self.last_id_at > max(STALL_S, STALL_GAPS * mean_gap_s)

    def take(self, chunk: TokenChunk, now: float) -> str | None:
        """Add the ids of a chunk; return what is wrong with them, if anything."""
        ids = chunk.token_ids
        if len(self.output_ids) + len(ids) > self.order.max_tokens:
            return f"the engine produced more than the {self.order.max_tokens} ids asked for"
        if min(ids) < 0 or max(ids) >= self.order.model.vocabulary_size:
            return "the engine produced an id outside the vocabulary"
        if self.order.sampling.logprobs is not None:
            if len(chunk.logprobs) != len(ids):
                return "the engine left logprobs out that were asked for"
            self.pending_logprobs.extend(chunk.logprobs)
        if self.first_id_at is None:
            self.first_id_at = now
        self.last_id_at = now
        self.output_ids.extend(ids)
        self.pending_ids.extend(ids)
        return None

    def take_frame(self) -> e.FrameData:
        """Hand out the ids that wait, for good."""
        first_index = self.order.first_index + len(self.output_ids) - len(self.pending_ids)
        frame = e.FrameData(self.order.key, first_index, self.pending_ids, self.pending_logprobs)
        self.pending_ids = []
        self.pending_logprobs = []
        return frame

    def statement(self, engine: capability_pb2.Engine, now: float) -> e.SignStatement:
        first_at = self.first_id_at if self.first_id_at is not None else now
        return e.SignStatement(
            order=self.order,
            engine=engine.kind,
            engine_version=engine.version,
            output_ids=self.output_ids,
            finish_reason=self.finish_reason,
            first_token_ms=round((first_at - self.assigned_at) * 1000),
            total_ms=round((now - self.assigned_at) * 1000),
            energy=self.energy,
            embedding=self.embedding,
            scores=self.scores,
        )


class FrameQueue:
    """Ids of all attempts that wait for company.

    The first leave after everything that is already waiting in the event loop,
    later ones a frame delay after their predecessors at the latest.
    """

    def __init__(self, now: float) -> None:
        # In the order of their first waiting id.
        self._attempts: list[Attempt] = []
        self._scheduled = False
        self._flushed_at = now

    def clear(self) -> None:
        self._attempts.clear()

    def add(self, attempt: Attempt) -> None:
        """Note an attempt whose first waiting ids were just taken."""
        self._attempts.append(attempt)

    def schedule(self, delay_s: float, now: float) -> list[e.Command]:
        if self._scheduled or not self._attempts:
            return []
        self._scheduled = True
        return [e.ScheduleFlush(max(now, self._flushed_at + delay_s))]

    def due(self, now: float) -> list[e.Command]:
        self._scheduled = False
        return self.flush(now)

    def flush(self, now: float) -> list[e.Command]:
        """Send all that waits."""
        if not self._attempts:
            return []
        frames = [attempt.take_frame() for attempt in self._attempts]
        self._attempts.clear()
        self._flushed_at = now
        return [e.SendFrames(frames)]
