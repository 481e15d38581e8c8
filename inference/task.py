"""What is asked of a fleet: a frozen, validated request in token ids.

A task carries no code: a kind, ids, numbers. The coordinator renders and
tokenizes before a `TaskSpec` exists and turns ids back into text after it, so
that everything below (scheduler, agents, engines) sees integers only.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

TaskId = NewType("TaskId", str)
NodeId = NewType("NodeId", str)
OwnerId = NewType("OwnerId", str)
TenantId = NewType("TenantId", str)
EngineId = NewType("EngineId", str)
# "sha256:" and 64 hex digits.
ManifestDigest = NewType("ManifestDigest", str)

# A typecode whose items are 4 bytes on every platform CPython runs on.
_UINT32 = "I"


class TaskKind(Enum):
    GENERATE = "generate"
    SCORE = "score"
    EMBED = "embed"


class ServiceClass(Enum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class PrivacyClass(Enum):
    PUBLIC = "public"
    TRUSTED_OWNERS = "trusted_owners"
    OWN_NODES = "own_nodes"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next id is drawn; every field has its neutral value as default."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None  # alternatives per position; None asks for no logprobs at all

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the draw depends on which ids are output, not only on the ids themselves."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One sequence to generate, score or embed. Never changes after admission."""

    task_id: TaskId
    tenant_id: TenantId
    kind: TaskKind
    model: str
    manifest_digest: ManifestDigest
    prompt_ids: "array[int]"
    sampling: Sampling
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    vocabulary_size: int
    service_class: ServiceClass
    privacy_class: PrivacyClass
    # Whether somebody reads along. What nobody has read can start again from nothing.
    streaming: bool
    # Seconds from submission; None waits as long as the queue allows.
    deadline_s: float | None = None
    # Until the first token; None for what the service class promises.
    max_ttft_ms: int | None = None
    # The only node that may run it: an audit, or a canary. None for whoever is best.
    only_node: NodeId | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    rank: int  # 1 is the most likely; 0 where the engine does not say


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


def token_array(ids: Sequence[int]) -> "array[int]":
    """Return ids as a compact array of unsigned 32-bit integers."""
    return array(_UINT32, ids)


def pack_token_ids(ids: Sequence[int]) -> bytes:
    """Return ids as they are hashed and sent: 4 bytes each, little-endian."""
    packed = array(_UINT32, ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> "array[int]":
    """Return the ids packed by `pack_token_ids`.

    Raises:
        ValueError: the length is no multiple of 4.
    """
    ids = array(_UINT32)
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def prompt_sha256(salt: bytes, packed_ids: bytes) -> bytes:
    """Return the salted hash that binds a task header to the ids beside it."""
    return hashlib.sha256(salt + packed_ids).digest()


def scores_bytes(scores: Iterable[PositionLogprobs]) -> bytes:
    """Return the bytes of a SCORE task's output that a result statement hashes.

    One record per position: id (4 bytes) and log-probability (float32), little-endian.
    """
    return b"".join(struct.pack("<If", score.chosen.token_id, score.chosen.logprob) for score in scores)
