"""Readers of many answers at once, who hold every id against the answer of an undisturbed engine.

The fake engine's next id is a hash of all ids before it: an id lost, doubled or
altered anywhere changes all that follows.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dev_network import DevNetwork
from network_settings import EngineOptions
from slackwater import AsyncClient, AttemptBroken, AttemptStarted, Delta, SlackwaterError

from inference.fake_model import FakeVocabulary, expected_ids
from inference.task import Sampling

PROMPT_TOKENS = 64
# A stream that brings nothing for so long counts as hung. The slowest legitimate pause, a frozen agent, is below 3 s.
HUNG_S = 15.0


@dataclass
class Reader:
    """One reader and the stream it is reading now."""

    node_id: str = ""
    received: int = 0
    last_s: float = 0.0
    # An attempt broke, and no id of the next one has come yet.
    at_seam: bool = False


@dataclass
class Tally:
    finished: int = 0
    lost: int = 0
    doubled: int = 0
    altered: int = 0
    hung: int = 0
    failed: list[str] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)


class Streams:
    """Reads answers of `tokens` ids, one after the other for each reader, until `stopping`."""

    def __init__(self, network: DevNetwork, client: AsyncClient, *, readers: int, tokens: int, seed: int) -> None:
        self._network = network
        self._client = client
        self._tokens = tokens
        self._vocabulary = FakeVocabulary.load(EngineOptions().model_directory / "tokenizer.json")
        self.random = random.Random(seed)
        self.readers = [Reader() for _ in range(readers)]
        self.stopping = False
        self.tally = Tally()

    def start(self, group: asyncio.TaskGroup) -> None:
        for reader in self.readers:
            group.create_task(self._read_until_stopped(reader))

    async def choose(self, streams_min: int) -> tuple[int, list[Reader]]:
        """Wait until so many streams are in mid-answer; return the agent with the most of them, and their readers."""
        while True:
            busy = [reader for reader in self.readers if reader.node_id and reader.received]
            if len(busy) >= streams_min:
                break
            await asyncio.sleep(0.01)
        nodes = [reader.node_id for reader in busy]
        victim = max(sorted(set(nodes)), key=nodes.count)
        return self._network.index_of(victim), [reader for reader in busy if reader.node_id == victim]

    async def wait_for_seams(self, affected: Sequence[Reader], index: int) -> None:
        """Wait until every stream that was on an agent has gone on elsewhere, ended, or been counted as hung."""
        node_id = self._network.ready.agents[index].node_id
        left = list(affected)
        deadline_s = time.monotonic() + HUNG_S + 1
        while left and time.monotonic() < deadline_s:
            await asyncio.sleep(0.005)
            left = [reader for reader in left if reader.node_id == node_id or (reader.node_id and reader.at_seam)]

    async def _read_until_stopped(self, reader: Reader) -> None:
        while not self.stopping:
            await self._read(reader)

    async def _read(self, reader: Reader) -> None:
        """Read one answer to its end and compare it with what it should be."""
        prompt = [self.random.choice(self._vocabulary.ids) for _ in range(PROMPT_TOKENS)]
        seed = self.random.getrandbits(32)
        wanted = expected_ids(prompt, Sampling(temperature=0.0, seed=seed), self._tokens, self._vocabulary)
        received: list[int] = []
        reader.received, reader.at_seam = 0, False
        answer = self._client.complete(
            prompt, model=self._network.ready.model, temperature=0, seed=seed, max_tokens=self._tokens
        )
        try:
            while True:
                async with asyncio.timeout(HUNG_S):
                    event = await anext(answer, None)
                if event is None:
                    break
                if isinstance(event, AttemptStarted):
                    reader.node_id = event.node_id
                elif isinstance(event, AttemptBroken):
                    reader.at_seam = True
                elif isinstance(event, Delta):
                    self._take(reader, event, received)
        except TimeoutError:
            self.tally.hung += 1
            await answer.cancel()
        except SlackwaterError as error:
            self.tally.failed.append(f"{type(error).__name__}: {error}")
        else:
            self.tally.finished += 1
            self.tally.lost += max(0, self._tokens - len(received))
        finally:
            reader.node_id, reader.received = "", 0
        self.tally.altered += sum(got != want for got, want in zip(received, wanted, strict=False))

    def _take(self, reader: Reader, delta: Delta, received: list[int]) -> None:
        now_s = time.monotonic()
        ahead = delta.first_index - len(received)
        self.tally.lost += max(0, ahead)
        self.tally.doubled += max(0, -ahead)
        if reader.at_seam and received:
            self.tally.gaps_ms.append((now_s - reader.last_s) * 1000)
        reader.at_seam = False
        received.extend(delta.token_ids)
        reader.received, reader.last_s = len(received), now_s
