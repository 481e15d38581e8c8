"""Fakes of the coordinator's ports, scripted step by step. For tests only."""

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from coordinator.errors import Reason, SlackwaterError
from coordinator.tasks_port import (
    Accepted,
    Answer,
    AnswerEvent,
    ClassQuote,
    Delta,
    Failed,
    Finished,
    ModelInfo,
    QuoteRequest,
    TaskQuote,
    TaskRequest,
    TaskSummary,
)
from inference.task import (
    FinishReason,
    ManifestDigest,
    PositionLogprobs,
    ServiceClass,
    TaskId,
    TaskKind,
    TenantId,
    TokenLogprob,
)
from inference.text import Detokenizer, Message, Tokenizer

FAKE_MODEL = "fake-model"
FAKE_API_KEY = "sw-fake-key"
FAKE_TENANT = TenantId("tenant-1")
FAKE_DIGEST = ManifestDigest("sha256:" + "ab" * 32)


class FakeTokenizer(Tokenizer):
    """One id for each byte of UTF-8, so that any character beyond ASCII is spread over several ids."""

    def __init__(self) -> None:
        # The real one reads files.
        pass

    @property
    def vocabulary_size(self) -> int:
        return 256

    def render(self, messages: Sequence[Message]) -> str:
        return "".join(f"<{message.role}>{message.content}" for message in messages)

    def encode_chat(self, messages: Sequence[Message]) -> "array[int]":
        return self.encode(self.render(messages))

    def encode(self, text: str) -> "array[int]":
        return array("I", list(text.encode()))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def detokenizer(self) -> Detokenizer:
        return Detokenizer([bytes([byte]) for byte in range(256)], strip_first_space=False)


class FakeTimers:
    """An event loop's `call_later`, on a clock that is moved by hand."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[FakeTimer] = []

    @property
    def waiting(self) -> int:
        """Timers that would still go off."""
        return len(self._timers)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "FakeTimer":
        timer = FakeTimer(self._timers, self._now + delay_s, callback)
        self._timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        self._now += seconds
        for timer in [timer for timer in self._timers if timer.at <= self._now]:
            timer.cancel()
            timer.callback()


@dataclass(slots=True, eq=False)
class FakeTimer:
    timers: "list[FakeTimer]"
    at: float
    callback: Callable[[], None]

    def cancel(self) -> None:
        if self in self.timers:
            self.timers.remove(self)


@dataclass(frozen=True, slots=True)
class Wait:
    """A step that holds the answer until the event is set; `reached` tells the test that it holds."""

    until: asyncio.Event
    reached: asyncio.Event


def wait_step() -> Wait:
    return Wait(asyncio.Event(), asyncio.Event())


# One step of an answer: a batch of events, a wait, or an exception out of the iterator.
Step = tuple[AnswerEvent, ...] | Wait | Exception


def delta(first_index: int, text: str, *, logprobs: int | None = None) -> Delta:
    """Return a delta of one id per byte of `text`, with that many alternatives per position."""
    ids = tuple(text.encode())
    positions: tuple[PositionLogprobs, ...] = ()
    if logprobs is not None:
        positions = tuple(
            PositionLogprobs(
                TokenLogprob(token_id, -0.5, 1),
                tuple(TokenLogprob((token_id + rank) % 256, -0.5 - rank, rank + 1) for rank in range(logprobs)),
            )
            for token_id in ids
        )
    return Delta(first_index=first_index, token_ids=ids, text=text, logprobs=positions)


def finished(completion_tokens: int, *, prompt_tokens: int = 7, reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        header=None,
        statement=None,
        node_public_key=b"",
    )


def text_steps(pieces: Iterable[str], *, logprobs: int | None = None) -> list[Step]:
    """Return the steps of a whole answer, one batch per piece."""
    steps: list[Step] = []
    index = 0
    for piece in pieces:
        step = delta(index, piece, logprobs=logprobs)
        index += len(step.token_ids)
        steps.append((step,))
    steps.append((finished(index),))
    return steps


class FakeAnswer:
    """An answer that plays its steps, and counts who followed it to which end."""

    def __init__(self, task_id: TaskId, steps: Sequence[Step], model: str) -> None:
        self._steps = steps
        self._accepted = Accepted(
            task_id=task_id,
            model=model,
            manifest_digest=FAKE_DIGEST,
            prompt_tokens=7,
            resumable=True,
            seed=1,
        )
        self._tokenizer = FakeTokenizer()
        self.closed = asyncio.Event()
        self.times_closed = 0
        self.batches_taken = 0

    @property
    def accepted(self) -> Accepted:
        return self._accepted

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def follow(self, from_index: int = 0) -> "FakeFollower":
        return FakeFollower(self, self._play(from_index))

    async def _play(self, from_index: int) -> AsyncGenerator[tuple[AnswerEvent, ...], None]:
        yield (self._accepted,)
        for step in self._steps:
            if isinstance(step, Wait):
                step.reached.set()
                await step.until.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                self.batches_taken += 1
                yield tuple(event for event in step if not isinstance(event, Delta) or event.first_index >= from_index)
                if isinstance(step[-1], Finished | Failed):
                    return


class FakeFollower(AsyncIterator[tuple[AnswerEvent, ...]]):
    """The iterator of `FakeAnswer.follow`; counts its closings on the answer."""

    def __init__(self, answer: FakeAnswer, batches: AsyncGenerator[tuple[AnswerEvent, ...], None]) -> None:
        self._answer = answer
        self._batches = batches

    async def __anext__(self) -> tuple[AnswerEvent, ...]:
        return await anext(self._batches)

    async def aclose(self) -> None:
        await self._batches.aclose()
        self._answer.times_closed += 1
        self._answer.closed.set()


class FakeTasks:
    """A `Tasks` that answers from scripts, in order; a default answer when they are used up.

    `script` takes the steps of the next answer, or the error of the next
    submission. `submitting`, when set, holds every submission until it is
    released.
    """

    def __init__(self, default: Callable[[TaskRequest], Sequence[Step]] | None = None) -> None:
        self._default = default or _echo
        self._scripts: deque[Sequence[Step] | Exception] = deque()
        self.submitted: list[tuple[TenantId, TaskRequest]] = []
        self.answers: list[FakeAnswer] = []
        self.cancelled: list[TaskId] = []
        self.quoted: list[tuple[TenantId, QuoteRequest]] = []
        self.submitting: Wait | None = None
        self.submission_cancelled = asyncio.Event()
        self.is_ready = True
        self.model_infos = [fake_model()]

    def script(self, steps: Sequence[Step] | Exception) -> None:
        self._scripts.append(steps)

    async def submit(self, tenant_id: TenantId, request: TaskRequest) -> Answer:
        self.submitted.append((tenant_id, request))
        if self.submitting is not None:
            self.submitting.reached.set()
            try:
                await self.submitting.until.wait()
            except asyncio.CancelledError:
                self.submission_cancelled.set()
                raise
        if all(info.name != request.model for info in self.model_infos):
            raise SlackwaterError(Reason.MODEL_NOT_FOUND, "no such model is served", param="model")
        steps = self._scripts.popleft() if self._scripts else self._default(request)
        if isinstance(steps, Exception):
            raise steps
        answer = FakeAnswer(TaskId(f"task-{len(self.submitted)}"), steps, request.model)
        self.answers.append(answer)
        return answer

    def attach(self, tenant_id: TenantId, task_id: TaskId) -> Answer:
        return self._find(task_id)

    def cancel(self, tenant_id: TenantId, task_id: TaskId) -> None:
        self._find(task_id)
        self.cancelled.append(task_id)

    async def summarize(self, tenant_id: TenantId, task_id: TaskId) -> TaskSummary:
        answer = self._find(task_id)
        return TaskSummary(
            task_id=task_id,
            status="running",
            prompt_tokens=answer.accepted.prompt_tokens,
            completion_tokens=0,
            attempts=(),
            error=None,
        )

    async def quote(self, tenant_id: TenantId, request: QuoteRequest) -> TaskQuote:
        self.quoted.append((tenant_id, request))
        return fake_quote(request.task.model)

    def models(self) -> list[ModelInfo]:
        return self.model_infos

    def ready(self) -> bool:
        return self.is_ready

    def _find(self, task_id: TaskId) -> FakeAnswer:
        for answer in self.answers:
            if answer.accepted.task_id == task_id:
                return answer
        raise SlackwaterError(Reason.TASK_NOT_FOUND, f"no task {task_id}", param="task_id")


def fake_model(name: str = FAKE_MODEL) -> ModelInfo:
    return ModelInfo(
        name=name,
        revision="1",
        manifest_digest=FAKE_DIGEST,
        licence="Apache-2.0",
        kind=TaskKind.GENERATE,
        context_tokens=2048,
        engines_ready=1,
        created_at_ms=1_700_000_000_123,
    )


def fake_quote(model: str = FAKE_MODEL) -> TaskQuote:
    """Return a quote in which interactive is met, standard waits for an engine, and batch has nobody."""
    return TaskQuote(
        model=model,
        prompt_tokens=7,
        max_tokens=100,
        likely_tokens=50,
        max_price_micro=101_750,
        likely_price_micro=51_750,
        grid_grams_per_kwh=400,
        classes=(
            ClassQuote(
                service_class=ServiceClass.INTERACTIVE,
                target_met=True,
                wait_ms=0.0,
                first_token_ms=250.5,
                token_ms=12.5,
                joules=36.0,
                energy_method="counter",
                co2_g=0.004,
            ),
            ClassQuote(
                service_class=ServiceClass.STANDARD, target_met=False, wait_ms=60_000.0, first_token_ms=60_000.0
            ),
            ClassQuote(service_class=ServiceClass.BATCH, target_met=False),
        ),
    )


async def authenticate_fake_key(secret: str) -> TenantId:
    """Know one key, `FAKE_API_KEY`."""
    if secret != FAKE_API_KEY:
        raise SlackwaterError(Reason.UNAUTHENTICATED, "unknown API key")
    return FAKE_TENANT


def _echo(request: TaskRequest) -> Sequence[Step]:
    logprobs = request.sampling.logprobs
    return text_steps(["Hello", ",", " world", "."], logprobs=logprobs)
