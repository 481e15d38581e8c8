"""What waits to be tokenized is bounded, and what has left no longer counts."""

import asyncio
import threading
from array import array
from typing import cast

import pytest

from coordinator.admission import INLINE_CHARACTERS_MAX, ServedModel
from coordinator.errors import Reason, SlackwaterError
from coordinator.prompt_encoder import CHARACTERS_MAX, THREADS, PromptEncoder
from coordinator.tasks_port import TaskRequest
from coordinator.testing import FakeTokenizer
from inference.manifest import Manifest
from inference.text import Tokenizer

# All threads are taken, and a little waits; or all that may.
LONG = "x" * (INLINE_CHARACTERS_MAX + 1)
HALF = "x" * (CHARACTERS_MAX // 2)


class GatedTokenizer(FakeTokenizer):
    """Encodes long texts when the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.encoded = 0

    def encode(self, text: str) -> "array[int]":
        assert self.gate.wait(10)
        self.encoded += 1
        return array("I", [len(text)])


@pytest.fixture
def tokenizer() -> GatedTokenizer:
    return GatedTokenizer()


@pytest.fixture
def model(tokenizer: GatedTokenizer) -> ServedModel:
    return ServedModel(cast(Manifest, None), cast(Tokenizer, tokenizer), created_at_ms=0)


def request(text: str) -> TaskRequest:
    return TaskRequest(model="model", input=text)


async def test_what_is_too_much_to_wait_is_told_to_come_back(tokenizer: GatedTokenizer, model: ServedModel) -> None:
    """Mutations seen to fail here: no bound; a prompt counts for ever."""
    encoder = PromptEncoder()
    both = [asyncio.create_task(encoder.encode(model, request(HALF))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(SlackwaterError) as refused:
        await encoder.encode(model, request(LONG))
    assert (refused.value.reason, refused.value.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    tokenizer.gate.set()
    assert [list(ids) for ids in await asyncio.gather(*both)] == [[len(HALF)]] * 2
    assert list(await encoder.encode(model, request(LONG))) == [len(LONG)]


async def test_who_leaves_while_waiting_costs_no_work(tokenizer: GatedTokenizer, model: ServedModel) -> None:
    encoder = PromptEncoder()
    working = [asyncio.create_task(encoder.encode(model, request(LONG))) for _ in range(THREADS)]
    waiting = [asyncio.create_task(encoder.encode(model, request(HALF))) for _ in range(1)]
    await asyncio.sleep(0)
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting)
    tokenizer.gate.set()
    await asyncio.gather(*working)
    await encoder.encode(model, request(HALF))
    assert tokenizer.encoded == THREADS + 1
