"""Tokenizes prompts: short ones at once, long ones in threads of their own, with a bound on what waits.

Four million letters without a space take seconds. In the threads that also
look up keys and nodes, a dozen such prompts would keep everybody out.
"""

import asyncio
import os
from array import array
from concurrent.futures import ThreadPoolExecutor

from coordinator.admission import INLINE_CHARACTERS_MAX, ServedModel, encode, input_size
from coordinator.errors import Reason, SlackwaterError
from coordinator.tasks_port import TaskRequest

# One core stays with the event loop; the tokenizer lets go of the interpreter while it works.
THREADS = max(1, (os.cpu_count() or 1) - 1)
# Characters of all prompts that wait or are worked on: eight of the largest that the edges take.
CHARACTERS_MAX = 64 * 1024 * 1024
# When to come back: a second is four hundred thousand characters of the worst kind, millions of any other.
RETRY_AFTER_S = 1.0


class PromptEncoder:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._characters = 0

    async def encode(self, model: ServedModel, request: TaskRequest) -> "array[int]":
        """Return the ids of a prompt.

        Raises:
            SlackwaterError: INVALID_ARGUMENT where there is no such prompt; QUEUE_FULL where too much waits.
        """
        size = input_size(request.input)
        if size <= INLINE_CHARACTERS_MAX:
            return encode(model, request)
        if self._characters + size > CHARACTERS_MAX:
            raise SlackwaterError(
                Reason.QUEUE_FULL, "too many long prompts wait to be tokenized", retry_after_s=RETRY_AFTER_S
            )
        self._characters += size
        try:
            # Whoever leaves takes a prompt that waits out of the queue; one that is being worked on stays uncounted.
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode, model, request)
        finally:
            self._characters -= size
