"""Every bound of the HTTP edge, by name."""

from dataclasses import dataclass

# Bounds on the shape of a request. OpenAI's where it states one.
MAX_MESSAGES = 2048  # a chat longer than this is a batch in disguise
MAX_PARTS = 2048  # text parts of one message
MAX_STOP_STRINGS = 4  # OpenAI's
MAX_STOP_BYTES = 256  # as in TaskService: the assembler holds back up to this much text
MAX_CHAT_TOP_LOGPROBS = 20  # OpenAI's
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's
MAX_TOKENS = 2**31 - 1  # no model has such a context; submit knows the real one
MAX_TOKEN_ID = 2**32 - 1  # ids travel as 4 bytes
MAX_SEED = 2**63 - 1  # 63 bits, as the sampler takes
MAX_TOP_K = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions

# A key of ours has 50 characters or so; a longer one is not worth hashing.
MAX_API_KEY_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """What one gateway process takes on. Tests shrink these; no operator needs to."""

    # A prompt of a million tokens is about 4 MB of text.
    body_bytes: int = 8 * 1024 * 1024
    # A body up to this size parses in under 2 ms, which the event loop can spare.
    inline_parse_bytes: int = 256 * 1024
    # Larger bodies read and parsed at the same time: 16 x 8 MB in memory at most.
    large_bodies: int = 16
    # The time a client has to send its body, and to fetch a whole answer that does not stream.
    body_timeout_s: float = 60.0
    # Requests open at once, waiting or streaming; each costs about 100 KB with its connection.
    open_requests: int = 4096
    # Proxies close a connection that is silent for 30 to 60 s.
    heartbeat_s: float = 10.0
    # Unsent bytes of one stream before it waits for its client.
    write_buffer_bytes: int = 64 * 1024
    # The time a client that streams has to read what is buffered before it is cut off.
    slow_client_s: float = 30.0


DEFAULT_LIMITS = GatewayLimits()
