"""The prompts of calibrations and records, and the seeds that go with them. No torch."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from inference.sampling import mix

PROMPTS_FILE: Final = Path(__file__).with_name("calibration_prompts.toml")
# Of SmolLM2.
END_OF_TURN: Final = 2
# Eight blocks of evidence.
MAX_TOKENS: Final = 128


class StoredAnswer(msgspec.Struct):
    """An answer of an engine that runs in another environment than the verifier."""

    prompt_ids: list[int]
    output_ids: list[int]
    seed: int
    stopped: bool


def read_prompts(tokenizer: Any) -> list[tuple[int, ...]]:
    """Return the ids of all prompts; a chat is a user's turn without a system message before it."""
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in read_texts("chat")]
    return [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in [*chats, *read_texts("raw")]]


def seed_of(name: str, index: int) -> int:
    """Return a seed that no other variant has."""
    return mix(int.from_bytes(name.encode()[:8].ljust(8), "little") ^ mix(len(name) << 32 | index)) >> 1


def read_texts(kind: str) -> Sequence[str]:
    texts: list[str] = tomllib.loads(PROMPTS_FILE.read_text())[kind]
    return texts


def read_answers(path: Path) -> list[StoredAnswer]:
    return msgspec.json.decode(path.read_bytes(), type=list[StoredAnswer])
