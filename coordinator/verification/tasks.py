"""Work that verification gives to nodes: a canary to answer, an answer of another node to score, answers to time.

To a node these are tasks like any other: same ids, same order, same pay. The
coordinator pays for them out of an account of its own.
"""

import asyncio
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from coordinator.clock import Clock
from coordinator.errors import SlackwaterError
from coordinator.ledger.entries import VERIFICATION_TENANT
from coordinator.scheduler import events as e
from coordinator.scheduler.driver import SchedulerDriver
from coordinator.tasks_port import AttemptBroken, AttemptStarted, Finished
from inference.manifest import Manifest
from inference.task import (
    FinishReason,
    NodeId,
    PositionLogprobs,
    PrivacyClass,
    Sampling,
    ServiceClass,
    TaskId,
    TaskKind,
    TaskSpec,
    token_array,
)

# A busy node has these behind its clients' work; beyond it nobody knows whether it would have answered.
DEADLINE_S = 120.0
# Of all ids of a score together; 13 bytes each, and a message to the coordinator may have 8 MiB (api/server.py).
# Beyond 7,800 ids each has fewer than 64.
SCORE_RIVALS_MAX = 500_000


class NotMeasured(Exception):
    """The node gave no answer: it left, was full, or failed. Says nothing about it."""


@dataclass(slots=True)
class Answer:
    """What a node made of a task. Implements coordinator.scheduler.driver.Sink.

    A task that was broken and begun again is no measurement of one attempt: `attempts` tells.
    """

    ids: "array[int]" = field(default_factory=lambda: token_array(()))
    attempts: int = 0
    finished: Finished | None = None
    _ended: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def start_attempt(self, event: AttemptStarted) -> None:
        self.attempts += 1

    def break_attempt(self, event: AttemptBroken) -> None:
        """What is broken is tried again by the scheduler, until the deadline."""

    def deliver(self, first_index: int, token_ids: Sequence[int], logprobs: tuple[PositionLogprobs, ...]) -> None:
        self.ids.extend(token_ids)

    def discard(self) -> None:
        del self.ids[:]

    def finish(self, event: Finished) -> None:
        self.finished = event
        self._end(None)

    def fail(self, error: SlackwaterError) -> None:
        self._end(NotMeasured(error.message))

    async def ended(self) -> Finished:
        """Wait for the end.

        Raises:
            NotMeasured: it was not answered, or not in one piece.
        """
        await self._ended
        assert self.finished is not None, "a task ends in one of two ways"
        if self.attempts != 1:
            raise NotMeasured(f"the answer is of {self.attempts} attempts")
        return self.finished

    def _end(self, failure: NotMeasured | None) -> None:
        if self._ended.done():
            return  # Nobody waits any more.
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)


@dataclass(slots=True, kw_only=True)
class ClockedAnswer(Answer):
    """An answer with the times, of one clock, at which it was ordered and at which its ids came."""

    clock: Clock
    ordered_at: float = 0.0
    first_id_at: float | None = None
    last_id_at: float = 0.0

    def start_attempt(self, event: AttemptStarted) -> None:
        Answer.start_attempt(self, event)
        self.ordered_at = self.clock.monotonic()

    def deliver(self, first_index: int, token_ids: Sequence[int], logprobs: tuple[PositionLogprobs, ...]) -> None:
        Answer.deliver(self, first_index, token_ids, logprobs)
        self.last_id_at = self.clock.monotonic()
        if self.first_id_at is None:
            self.first_id_at = self.last_id_at


class AuditTasks:
    """Submits such tasks and waits for them.

    Args:
        reserve: sets aside what a task may cost.
        boot_number: part of each task's id.
    """

    def __init__(self, driver: SchedulerDriver, reserve: Callable[[TaskSpec], None], boot_number: int) -> None:
        self._driver = driver
        self._reserve = reserve
        self._boot_number = boot_number

    async def answer(
        self,
        node_id: NodeId,
        manifest: Manifest,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
    ) -> tuple[Sequence[int], FinishReason]:
        """Have a node answer a prompt as a client would.

        Raises:
            NotMeasured: it did not.
        """
        answer = Answer()
        finished = await self._run(
            self._spec(
                node_id,
                manifest,
                kind=TaskKind.GENERATE,
                ids=prompt_ids,
                max_tokens=max_tokens,
                privacy_class=PrivacyClass.PUBLIC,
                sampling=sampling,
            ),
            answer,
        )
        return answer.ids, finished.finish_reason

    async def score(
        self, node_id: NodeId, manifest: Manifest, ids: Sequence[int], rivals: int, privacy_class: PrivacyClass
    ) -> Sequence[PositionLogprobs]:
        """Have a node say how likely each id after the first is, beside its most likely rivals.

        Args:
            rivals: how many of each id; fewer where the ids are so many that the answer would be too large.

        Raises:
            NotMeasured: it did not.
        """
        finished = await self._run(
            self._spec(
                node_id,
                manifest,
                kind=TaskKind.SCORE,
                ids=ids,
                max_tokens=0,
                privacy_class=privacy_class,
                sampling=Sampling(temperature=0.0, logprobs=min(rivals, SCORE_RIVALS_MAX // len(ids))),
            ),
            Answer(),
        )
        return finished.scores

    def to_time(
        self, node_id: NodeId, manifest: Manifest, prompts: Sequence[Sequence[int]], ids: int
    ) -> list[TaskSpec]:
        """Return tasks for `timed`: one answer of so many ids for each prompt, which nothing ends before."""
        specs = [
            self._spec(
                node_id,
                manifest,
                kind=TaskKind.GENERATE,
                ids=prompt,
                max_tokens=ids,
                privacy_class=PrivacyClass.PUBLIC,
                sampling=Sampling(seed=secrets.randbits(63)),
            )
            for prompt in prompts
        ]
        # Users' tasks come first.
        return [replace(spec, stop_token_ids=(), service_class=ServiceClass.BATCH) for spec in specs]

    async def timed(self, specs: Sequence[TaskSpec], clock: Clock) -> list[tuple[ClockedAnswer, Finished]]:
        """Have a node give all these answers at once.

        Raises:
            NotMeasured: one of them was not given; the others are cancelled.
        """
        answers = [ClockedAnswer(clock=clock) for _ in specs]
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._run(spec, answer)) for spec, answer in zip(specs, answers, strict=True)
                ]
        except* NotMeasured as failures:
            why = failures.exceptions[0]
            raise NotMeasured(str(why)) from why
        return [(answer, task.result()) for answer, task in zip(answers, running, strict=True)]

    def _spec(
        self,
        node_id: NodeId,
        manifest: Manifest,
        *,
        kind: TaskKind,
        ids: Sequence[int],
        max_tokens: int,
        privacy_class: PrivacyClass,
        sampling: Sampling,
    ) -> TaskSpec:
        return TaskSpec(
            task_id=TaskId(f"task-{self._boot_number:06x}-{secrets.token_hex(10)}"),
            tenant_id=VERIFICATION_TENANT,
            kind=kind,
            model=manifest.name,
            manifest_digest=manifest.digest,
            prompt_ids=token_array(ids),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=manifest.stop_token_ids,
            vocabulary_size=manifest.vocabulary_size,
            # What the usual client asks for: a node could tell canaries of a class of their own.
            service_class=ServiceClass.STANDARD,
            privacy_class=privacy_class,
            streaming=True,
            deadline_s=DEADLINE_S,
            only_node=node_id,
        )

    async def _run(self, spec: TaskSpec, answer: Answer) -> Finished:
        try:
            self._reserve(spec)
        except SlackwaterError as error:
            raise NotMeasured(error.message) from error
        self._driver.submit(spec, answer)
        try:
            return await answer.ended()
        except asyncio.CancelledError:
            self._driver.feed(e.TaskCancelled(spec.task_id))
            raise
