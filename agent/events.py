"""What happens to an agent, and what it does about it: the vocabulary of `agent.state`.

Events are past-tense facts, commands are orders to the driver; the outcome of
every order comes back as an event. Nothing here does anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.assignments import AttemptKey, NonceUse, ServedModel, TaskOrder
from agent.energy.card import CardSample
from agent.energy.meter import NO_ENERGY, TaskEnergy
from agent.errors import ExitStatus
from agent.owner.asks import AskSettings, EngineTerms
from agent.owner.consent import Consent
from agent.owner.events import LocalTimeObserved
from inference.engine import TokenChunk
from inference.task import FinishReason, PositionLogprobs
from protos.slackwater.common.v1 import capability_pb2, envelope_pb2
from protos.slackwater.node.v1 import node_service_pb2

FailureReason = node_service_pb2.FailureReason
RefusalReason = node_service_pb2.RefusalReason
ClosingReason = node_service_pb2.ClosingReason


# ---- events from the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """A Welcome arrived; `asked_at` is when our Hello left."""

    asked_at: float
    cluster_id: str
    coordinator_time_ms: int
    heartbeat_busy_s: float
    heartbeat_idle_s: float
    frame_delay_s: float
    coordinator_keys: tuple[bytes, ...]
    protocol_version: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    detail: str


@dataclass(frozen=True, slots=True)
class AssignmentReceived:
    envelope: envelope_pb2.SignedEnvelope
    chunk_count: int


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    key: AttemptKey
    chunk_index: int
    packed_ids: bytes


@dataclass(frozen=True, slots=True)
class CancelReceived:
    key: AttemptKey


@dataclass(frozen=True, slots=True)
class DesiredReceived:
    sequence: int
    drain: bool
    attempts: frozenset[AttemptKey]
    # Work waits for these; one of them that is unloaded comes up.
    engines_wanted: tuple[str, ...] = ()
    # Engine ids and digests: what engines that are open to the fleet are to hold.
    models_wanted: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class NodeCredits:
    """What this node has earned by the coordinator's ledger, in micro-credits; `held_micro` is not released yet."""

    earned_micro: int
    held_micro: int


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    sequence: int
    coordinator_time_ms: int
    # None from a coordinator that keeps no ledger.
    credits: NodeCredits | None = None
    # Of each engine that it has heard of.
    terms: tuple[EngineTerms, ...] = ()


@dataclass(frozen=True, slots=True)
class ResultTaken:
    """The coordinator has a finished attempt; nobody will ask for it again."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class ClosingReceived:
    reason: "ClosingReason.ValueType"
    detail: str


# ---- events from the node itself


@dataclass(frozen=True, slots=True)
class EngineChunkArrived:
    """Ids of one attempt; by far the most frequent event."""

    key: AttemptKey
    chunk: TokenChunk


@dataclass(frozen=True, slots=True)
class EmbeddingComputed:
    key: AttemptKey
    vector: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ScoresComputed:
    key: AttemptKey
    scores: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine failed one attempt."""

    key: AttemptKey
    reason: "FailureReason.ValueType"
    detail: str


@dataclass(frozen=True, slots=True)
class ModelChecked:
    """Every byte of an engine's model is what its manifest says; the engine may be started."""

    engine_id: str
    model: ServedModel


@dataclass(frozen=True, slots=True)
class ModelFound:
    """The manifest of a model that the fleet wants on an engine is here, signed by a pinned release key."""

    engine_id: str
    model: ServedModel
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFetched:
    """Every byte of a model that the fleet wants on an engine is here and checked."""

    engine_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class ModelNotHad:
    """A model that the fleet wants on an engine cannot be had; `reason` is for people."""

    engine_id: str
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelsSeen:
    """What lies on the disk, and how many bytes of each model that is being fetched are there."""

    store: capability_pb2.ModelStore
    fetched_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class EngineChanged:
    """The supervisor tells how an engine stands."""

    engine: capability_pb2.Engine


@dataclass(frozen=True, slots=True)
class CanaryPassed:
    """The engine made a real token in a request begun at `started_at`."""

    engine_id: str
    started_at: float


@dataclass(frozen=True, slots=True)
class CanaryFailed:
    engine_id: str


@dataclass(frozen=True, slots=True)
class HardwareChanged:
    host: capability_pb2.Host
    gpus: tuple[capability_pb2.Gpu, ...]


@dataclass(frozen=True, slots=True)
class MachineResumed:
    """The machine has slept: processes with a context on a card do not work any more, and may not say so."""

    slept_s: float


@dataclass(frozen=True, slots=True)
class CardsListed:
    """The cards of this machine, or its processor where it has none."""

    cards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CardLent:
    """The owner's policy lends a card."""

    card: str


@dataclass(frozen=True, slots=True)
class CardWithdrawn:
    """The owner wants the card: whatever runs on it ends now."""

    card: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlotsShared:
    """Of the slots of an engine on a card this part is to be used; a card that is not named leaves all.

    A card whose power cannot be capped gets less to do instead.
    """

    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OwnerDrainChanged:
    """The owner wants no new work on this machine; what runs may end."""

    draining: bool


@dataclass(frozen=True, slots=True)
class LedgerJudged:
    """Whether the coordinator's ledger was rewritten: for such a coordinator no new work is done; what runs may end."""

    rewritten: bool


@dataclass(frozen=True, slots=True)
class LocalTimeKnown:
    """What the owner's clock shows."""

    time: LocalTimeObserved


@dataclass(frozen=True, slots=True)
class ConsentChanged:
    """The owner accepts something else from now on; what runs outside of it ends."""

    consent: Consent


@dataclass(frozen=True, slots=True)
class AsksChanged:
    """The owner asks something else for what is ordered from now on."""

    asks: AskSettings


@dataclass(frozen=True, slots=True)
class CardsSampled:
    """What cards read now; only of those that were asked anew since the last time."""

    samples: tuple[CardSample, ...]


@dataclass(frozen=True, slots=True)
class NonceRecorded:
    """From now on a restart of the agent remembers this nonce."""

    key: AttemptKey
    use: NonceUse


@dataclass(frozen=True, slots=True)
class NonceNotRecorded:
    key: AttemptKey
    detail: str


@dataclass(frozen=True, slots=True)
class StatementSigned:
    key: AttemptKey
    statement: envelope_pb2.SignedEnvelope


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The machine's owner or the operating system wants the agent to end."""


@dataclass(frozen=True, slots=True)
class FlushDue:
    """The moment named by `ScheduleFlush` has come."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class ChallengeAsked:
    """The coordinator wants to see what a card can do; `card_id` is empty for the processor."""

    challenge_id: str
    card_id: str


@dataclass(frozen=True, slots=True)
class ChallengeEnded:
    """A challenge was answered, refused or broken off."""

    challenge_id: str


OrderEvent = (
    AssignmentReceived
    | ChunkReceived
    | CancelReceived
    | DesiredReceived
    | HeartbeatReceived
    | ResultTaken
    | ChallengeAsked
)
CoordinatorEvent = OrderEvent | ClosingReceived
Event = (
    CoordinatorEvent
    | ChallengeEnded
    | Connected
    | Disconnected
    | EngineChunkArrived
    | EmbeddingComputed
    | ScoresComputed
    | EngineFailed
    | ModelChecked
    | ModelFound
    | ModelFetched
    | ModelNotHad
    | ModelsSeen
    | EngineChanged
    | CanaryPassed
    | CanaryFailed
    | HardwareChanged
    | CardsSampled
    | MachineResumed
    | CardsListed
    | CardLent
    | CardWithdrawn
    | SlotsShared
    | OwnerDrainChanged
    | LedgerJudged
    | LocalTimeKnown
    | ConsentChanged
    | AsksChanged
    | NonceRecorded
    | NonceNotRecorded
    | StatementSigned
    | StopRequested
    | FlushDue
    | Tick
)


# ---- commands to the connection


@dataclass(slots=True)
class FrameData:
    """Ids of one attempt on their way out. Mutable, so that a slow connection merges into it."""

    key: AttemptKey
    first_index: int
    token_ids: list[int]
    logprobs: list[PositionLogprobs]


@dataclass(frozen=True, slots=True)
class SendFrames:
    frames: list[FrameData]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendState:
    sequence: int
    host: capability_pb2.Host
    gpus: tuple[capability_pb2.Gpu, ...]
    engines: tuple[capability_pb2.Engine, ...]
    running: tuple[AttemptKey, ...]
    draining: bool
    # None where no engine has its model from the store.
    models: capability_pb2.ModelStore | None = None


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFinished:
    key: AttemptKey
    statement: envelope_pb2.SignedEnvelope
    embedding: tuple[float, ...] = ()
    scores: tuple[PositionLogprobs, ...] = ()
    # The order that it answers, where it is sent again.
    header: envelope_pb2.SignedEnvelope | None = None


@dataclass(frozen=True, slots=True)
class SendFailed:
    key: AttemptKey
    reason: "FailureReason.ValueType"
    detail: str


@dataclass(frozen=True, slots=True)
class SendRefused:
    key: AttemptKey
    reason: "RefusalReason.ValueType"
    detail: str


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """End this connection and open another, after `pause_s` at the earliest."""

    detail: str
    pause_s: float = 0.0


# ---- commands to the node


@dataclass(frozen=True, slots=True)
class RecordNonce:
    """Make the nonce outlive the process; outcome NonceRecorded or NonceNotRecorded."""

    key: AttemptKey
    use: NonceUse


@dataclass(frozen=True, slots=True)
class StartWork:
    """Hand a checked order to its engine; outcomes are the events from the engine."""

    engine_id: str
    order: TaskOrder
    prompt_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class AbortWork:
    key: AttemptKey


@dataclass(frozen=True, slots=True)
class CheckEngine:
    """Make one real token on the engine; outcome CanaryPassed or CanaryFailed."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Bring the engine up; outcomes are EngineChanged."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Kill the engine, at once and whole; outcomes are EngineChanged. Nothing of it is needed any more."""

    engine_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class FindModel:
    """Ask the coordinator for the manifest of a model; outcome ModelFound or ModelNotHad."""

    engine_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class FetchModel:
    """Fetch and check a model beside the one that the engine runs; outcome ModelFetched or ModelNotHad."""

    engine_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class LeaveModel:
    """Go on no more with what FindModel or FetchModel began."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class SwitchModel:
    """Stop the engine and have it run the model that was fetched; outcome ModelChecked."""

    engine_id: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignStatement:
    """Sign what became of an attempt; outcome StatementSigned."""

    order: TaskOrder
    engine: str
    engine_version: str
    output_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    first_token_ms: int
    total_ms: int
    energy: TaskEnergy = NO_ENERGY
    embedding: tuple[float, ...] = ()
    scores: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduleFlush:
    """Bring FlushDue at this time; a time that has passed means after everything that is already waiting."""

    at: float


@dataclass(frozen=True, slots=True)
class Exit:
    """Send what is queued, stop the engines, end the process."""

    status: ExitStatus
    detail: str = field(default="")


SendCommand = SendFrames | SendState | SendHeartbeat | SendFinished | SendFailed | SendRefused


@dataclass(frozen=True, slots=True)
class AnswerChallenge:
    """Have a prover answer on the card; outcome ChallengeEnded. `refusal` says why not, where it is not to be.

    Args:
        free: no engine is on the card, so that its memory may be filled.
    """

    challenge_id: str
    card_id: str
    refusal: str = ""
    free: bool = False


@dataclass(frozen=True, slots=True)
class StopChallenge:
    """Kill the prover at once: the card is wanted. Its end is told as ChallengeEnded."""

    reason: str


Command = (
    SendCommand
    | AnswerChallenge
    | StopChallenge
    | CloseConnection
    | RecordNonce
    | StartWork
    | AbortWork
    | CheckEngine
    | StartEngine
    | StopEngine
    | FindModel
    | FetchModel
    | LeaveModel
    | SwitchModel
    | SignStatement
    | ScheduleFlush
    | Exit
)
