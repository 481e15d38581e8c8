"""Log-probabilities in OpenAI's two shapes: chat's and the older one of completions."""

import math
from collections.abc import Sequence

from inference.task import PositionLogprobs, TokenLogprob
from inference.text import Tokenizer

# OpenAI's stand-in for minus infinity, which JSON cannot hold.
_LEAST_LOGPROB = -9999.0


def chat_logprobs(positions: Sequence[PositionLogprobs], tokenizer: Tokenizer) -> list[dict[str, object]]:
    """Return the `content` list of a chat choice's logprobs."""
    return [
        {**_entry(position.chosen, tokenizer), "top_logprobs": [_entry(other, tokenizer) for other in position.top]}
        for position in positions
    ]


def _entry(token: TokenLogprob, tokenizer: Tokenizer) -> dict[str, object]:
    raw = tokenizer.token_bytes(token.token_id)
    # `bytes` is exact; `token` shows a replacement character where a token is part of one.
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(token.logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """The four parallel lists of /v1/completions, whose offsets run over the whole answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, positions: Sequence[PositionLogprobs]) -> dict[str, list[object]]:
        """Return the lists for the positions that follow those taken before."""
        tokens: list[object] = []
        token_logprobs: list[object] = []
        top_logprobs: list[object] = []
        text_offset: list[object] = []
        for position in positions:
            raw = self._tokenizer.token_bytes(position.chosen.token_id)
            tokens.append(_shown(raw))
            token_logprobs.append(_finite(position.chosen.logprob))
            top_logprobs.append(
                {
                    _shown(self._tokenizer.token_bytes(other.token_id)): _finite(other.logprob)
                    for other in (*position.top, position.chosen)
                }
            )
            text_offset.append(self._offset)
            self._offset += len(raw.decode("utf-8", "ignore"))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }


def _shown(raw: bytes) -> str:
    """Return a token as text, or as OpenAI writes part of a character, so that no two tokens look alike."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
