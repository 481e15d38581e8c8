"""The prompts of calibrations and records, and the seeds that go with them. No torch."""

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from inference.task import pack_token_ids

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


def read_prompts(tokenizer: Any, file: Path) -> list[tuple[int, ...]]:
    """Return the ids of all prompts; a chat is a user's turn without a system message before it."""
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in read_texts(file, "chat")]
    texts = [*chats, *read_texts(file, "raw")]
    return [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def seed_of(variant: str, index: int, prompt_ids: Sequence[int]) -> int:
    """Return a seed that no answer of another variant, and none to another prompt, has."""
    digest = hashlib.sha256(f"{variant}/{index}/".encode() + pack_token_ids(prompt_ids)).digest()
    return int.from_bytes(digest[:8]) >> 1


def read_texts(file: Path, kind: str) -> Sequence[str]:
    texts: list[str] = tomllib.loads(file.read_text())[kind]
    return texts


def read_answers(path: Path) -> list[StoredAnswer]:
    return msgspec.json.decode(path.read_bytes(), type=list[StoredAnswer])
