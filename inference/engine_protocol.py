"""The engines' wire types: the token-level subset of vLLM's HTTP (docs/engines.md).

The client and our two servers read and write through these, so that what one
side sends is what the other accepts. vLLM's own fields that we never send are
refused by our servers and ignored by our client.
"""

from typing import Annotated, Any

import msgspec

GENERATE_PATH = "/inference/v1/generate"
ABORT_PATH = "/inference/v1/abort_requests"
EMBEDDINGS_PATH = "/v1/embeddings"
HEALTH_PATH = "/health"
VERSION_PATH = "/version"

# vLLM names a sequence by its request id behind this prefix; an abort has to use the whole name.
SEQUENCE_NAME_PREFIX = "generate-tokens-"

# The largest `logprobs` a caller may ask for (OpenAI's limit). The client asks the engine for one
# more, because a drawn id outside the top takes the place of the last alternative in vLLM's answer.
MAX_LOGPROBS = 20

# The most rivals of each id that a score may name. Of the ids that a temperature of 0.9 for 1 changes, 20 rivals show
# half (docs/verification.md); more would show little more, and a score of a thousand ids has 0.8 MB with 64.
MAX_SCORE_RIVALS = 64

# Ids that may end a sequence; models have one to five end ids, a task seldom adds more than one.
MAX_STOP_TOKEN_IDS = 16

# A client names a sequence by a task and an attempt; more is a mistake.
MAX_REQUEST_ID_CHARS = 256

# 16 bytes in hexadecimal are 32.
MAX_CACHE_SALT_CHARS = 64

TokenIdWire = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Ids = list[TokenIdWire]


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How to draw. `ignore_eos` makes `stop_token_ids` the only ids that end a sequence, on every engine."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] = 1.0
    stop_token_ids: Annotated[Ids, msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = []
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS + 1)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_SCORE_RIVALS)] | None = None
    ignore_eos: bool = True
    detokenize: bool = False


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
    token_ids: Annotated[Ids, msgspec.Meta(min_length=1)]
    sampling_params: SamplingBody
    stream: bool = False
    model: str | None = None
    # Engines without a cache of prompts have no use for it.
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    request_ids: list[str]


class EmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input: Annotated[Ids, msgspec.Meta(min_length=1)]
    encoding_format: str = "float"
    # vLLM's name for normalising the vector to unit length.
    use_activation: bool = True
    model: str | None = None


class Candidate(msgspec.Struct):
    """One id at one position. In a prompt's positions the id is the key, and 0 here."""

    token_id: TokenIdWire = 0
    logprob: float = 0.0
    rank: int | None = None


class Position(Candidate):
    """The drawn id and its rivals: the drawn one first, then by rank."""

    top_logprobs: list[Candidate] = []


class Positions(msgspec.Struct):
    content: list[Position] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    token_ids: Ids | None = None
    logprobs: Positions | None = None
    finish_reason: str | None = None


class StreamEvent(msgspec.Struct):
    """One `data:` line of a stream. Either choices or an error."""

    choices: list[Choice] = []
    error: Any = None


class ScoreAnswer(msgspec.Struct):
    """What a request with `prompt_logprobs` brings; the first position has no logprobs."""

    prompt_logprobs: list[dict[TokenIdWire, Candidate] | None] | None = None


class EmbeddingItem(msgspec.Struct):
    embedding: list[float]


class EmbeddingsAnswer(msgspec.Struct):
    data: list[EmbeddingItem]


class VersionAnswer(msgspec.Struct):
    version: str
