"""Which engine has read the beginning of a prompt before, and may still know it. Pure.

Engines keep what they have computed of a prompt for the next one that begins
alike: the next turn of a chat, the same instructions with another question. A
tenant's prompts are remembered by hashes of their beginnings, of 256 tokens and
each power of two above, under the tenant's name: nobody is sent where somebody
else's prompt was read, so nobody learns from a fast answer what others ask.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

from coordinator.scheduler.records import EngineKey
from inference.task import ManifestDigest, TaskSpec, TenantId

# Shorter beginnings are computed faster than it is worth to wait for one engine.
BEGINNING_TOKENS_MIN: Final = 256
# Some 40 MB. What was used least recently goes first, as it does in the engine.
BEGINNINGS_MAX: Final = 100_000
# An engine under load has overwritten its memory by then.
KEPT_S: Final = 600.0

_Key = tuple[TenantId, ManifestDigest, bytes]


class Affinity:
    """Remembers where prompts were sent."""

    def __init__(self) -> None:
        self._beginnings: OrderedDict[_Key, tuple[EngineKey, float]] = OrderedDict()

    def sent(self, spec: TaskSpec, engine: EngineKey, now: float) -> None:
        """Note that an engine reads a task's prompt."""
        for key, _ in _beginnings(spec):
            self._beginnings[key] = (engine, now)
            self._beginnings.move_to_end(key)
        while len(self._beginnings) > BEGINNINGS_MAX:
            self._beginnings.popitem(last=False)

    def warm(self, spec: TaskSpec, now: float) -> tuple[EngineKey, int] | None:
        """Return the engine that has read the most of a prompt, and how many tokens of it."""
        found: tuple[EngineKey, int] | None = None
        for key, tokens in _beginnings(spec):
            known = self._beginnings.get(key)
            if known is None or now - known[1] > KEPT_S:
                break
            found = known[0], tokens
        return found


def _beginnings(spec: TaskSpec) -> Iterator[tuple[_Key, int]]:
    """Yield what is remembered of a prompt, the shortest beginning first, with its length."""
    ids: array[int] = spec.prompt_ids
    if len(ids) < BEGINNING_TOKENS_MIN:
        return
    data = memoryview(ids)
    hashed, done, tokens = blake2b(digest_size=16), 0, BEGINNING_TOKENS_MIN
    while tokens <= len(ids):
        hashed.update(data[done:tokens])
        yield (spec.tenant_id, spec.manifest_digest, hashed.digest()), tokens
        done, tokens = tokens, 2 * tokens
