"""An agent's state played like a record of chess: events in, commands out. For tests."""

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent import events as e
from agent.assignments import AttemptKey, Audience, NonceCache
from agent.energy.day_counts import DayCounts, DayRecord
from agent.energy.work_log import WorkLog
from agent.owner.consent import Consent, ConsentSettings
from agent.owner.events import CPU_CARD
from agent.owner.lending import EngineUse
from agent.state import AgentState
from agent.testing import CLUSTER_ID, ENGINE_ID, MODEL, NODE_ID, make_header, ready_engine, seal_header
from inference.engine import TokenChunk
from inference.task import FinishReason, TaskId, pack_token_ids
from protos.slackwater.common.v1 import envelope_pb2

KEY = Ed25519PrivateKey.generate()
PUBLIC_KEY = KEY.public_key().public_bytes_raw()
# Coordinator time when the clock of the tests shows 0.
EPOCH_MS = 1_000_000_000
ONE = AttemptKey(TaskId("task-1"), 1)
TWO = AttemptKey(TaskId("task-2"), 1)
WELCOME = e.Connected(
    asked_at=0.0,
    cluster_id=CLUSTER_ID,
    coordinator_time_ms=EPOCH_MS,
    heartbeat_busy_s=1.0,
    heartbeat_idle_s=10.0,
    frame_delay_s=0.005,
    coordinator_keys=(PUBLIC_KEY,),
    protocol_version=1,
)


class Game:
    """An agent's state with a clock that the test moves."""

    def __init__(self, *, connected: bool = True, slots: int = 2, engines: dict[str, EngineUse] | None = None) -> None:
        self.now = 0.0
        self.state = AgentState(
            audience=Audience(CLUSTER_ID, NODE_ID, (PUBLIC_KEY,)),
            nonces=NonceCache(),
            attempts_max=8,
            consent=Consent(ConsentSettings()),
            work_log=WorkLog({}, DayCounts(DayRecord())),
            engines=engines or {ENGINE_ID: EngineUse(), "second": EngineUse()},
            now=self.now,
        )
        self.state.handle(e.CardsListed((CPU_CARD,)), self.now)
        self.state.handle(e.CardLent(CPU_CARD), self.now)
        if connected:
            self.play(WELCOME)
        self.play(e.ModelChecked(ENGINE_ID, MODEL), e.EngineChanged(ready_engine(slots=slots)))

    def play(self, *events: e.Event) -> list[e.Command]:
        """Feed events; states are left out of what comes back, since they have tests of their own."""
        commands = [command for event in events for command in self.state.handle(event, self.now)]
        return [command for command in commands if not isinstance(command, e.SendState)]

    def pass_time(self, seconds: float, step: float = 0.1) -> list[e.Command]:
        commands = []
        for _ in range(round(seconds / step)):
            self.now += step
            commands += self.state.handle(e.Tick(), self.now)
        return commands

    def begin(self, key: AttemptKey = ONE, *, durable: bool = True, **changes: Any) -> list[e.Command]:
        """Assign, send the prompt, and make the nonce durable; the attempt runs."""
        envelope = order(key, **changes)
        [record] = self.play(e.AssignmentReceived(envelope, 1))
        assert isinstance(record, e.RecordNonce)
        commands = self.play(e.ChunkReceived(key, 0, pack_token_ids([1, 2, 3])))
        if durable:
            commands += self.play(e.NonceRecorded(key, record.use))
        return commands

    def chunk(self, key: AttemptKey, *ids: int, finish: FinishReason | None = None) -> list[e.Command]:
        return self.play(e.EngineChunkArrived(key, TokenChunk(ids, finish_reason=finish)))


def order(key: AttemptKey = ONE, **changes: Any) -> envelope_pb2.SignedEnvelope:
    nonce = f"{key.task_id}/{key.attempt}".encode().ljust(16, b".")
    fields = {"task_id": key.task_id, "attempt": key.attempt, "nonce": nonce}
    return seal_header(make_header(**{**fields, **changes}), KEY)


def failed(key: AttemptKey, reason: str, detail: str) -> e.SendFailed:
    return e.SendFailed(key, e.FailureReason.Value(f"FAILURE_REASON_{reason}"), detail)


def refused(commands: list[e.Command]) -> str:
    [command] = commands
    assert isinstance(command, e.SendRefused)
    return e.RefusalReason.Name(command.reason).removeprefix("REFUSAL_REASON_")


def sent_ids(commands: list[e.Command]) -> list[tuple[AttemptKey, int, list[int]]]:
    return [
        (frame.key, frame.first_index, frame.token_ids)
        for command in commands
        if isinstance(command, e.SendFrames)
        for frame in command.frames
    ]
