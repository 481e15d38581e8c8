"""Joins the chunks of one prompt and holds them against its header. Pure."""

import hashlib
from array import array
from typing import NoReturn

from agent.assignments import TaskOrder
from agent.errors import AssignmentInvalid, RefusalReason
from inference.task import token_array, unpack_token_ids

# As documented for PromptChunk.
CHUNK_BYTES_MAX = 64 * 1024


class PromptAssembly:
    """Joins the chunks of one prompt and holds them against the header, chunk by chunk."""

    def __init__(self, order: TaskOrder) -> None:
        self._order = order
        self._hash = hashlib.sha256(order.prompt_salt)
        self._chunks = 0
        self.ids: array[int] = token_array(())

    def add(self, chunk_index: int, packed_ids: bytes) -> bool:
        """Take the next chunk; return whether the prompt is complete, which implies that its hash held.

        Raises:
            AssignmentInvalid: PROMPT_MISMATCH, and the attempt must not run.
        """
        if chunk_index != self._chunks or chunk_index >= self._order.chunk_count:
            self._fail(f"chunk {chunk_index} of {self._order.chunk_count} came, {self._chunks} was due")
        if not 4 <= len(packed_ids) <= CHUNK_BYTES_MAX or len(packed_ids) % 4:
            self._fail(f"chunk {chunk_index} has {len(packed_ids)} bytes")
        ids = unpack_token_ids(packed_ids)
        if max(ids) >= self._order.model.vocabulary_size:
            self._fail(f"chunk {chunk_index} has an id outside the vocabulary")
        self.ids.extend(ids)
        if len(self.ids) > self._order.prompt_token_count:
            self._fail(f"more than {self._order.prompt_token_count} ids came")
        self._hash.update(packed_ids)
        self._chunks += 1
        if self._chunks < self._order.chunk_count:
            return False
        if len(self.ids) != self._order.prompt_token_count:
            self._fail(f"{len(self.ids)} ids came, {self._order.prompt_token_count} were announced")
        if self._hash.digest() != self._order.prompt_sha256:
            self._fail("the salted hash differs from the header's")
        return True

    def _fail(self, detail: str) -> NoReturn:
        raise AssignmentInvalid(RefusalReason.REFUSAL_REASON_PROMPT_MISMATCH, detail)
