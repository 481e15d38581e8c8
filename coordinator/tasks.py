"""Admits tasks and keeps their answers: the coordinator's side of tasks_port.

What a caller asks is checked here, rendered and tokenized (off the event loop
where that could take more than a moment), frozen into a `TaskSpec`, and handed
to the scheduler's driver with a `LiveAnswer` as its sink.
"""

import asyncio
import math
import re
import secrets
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from coordinator.answers import LiveAnswer
from coordinator.clock import Clock
from coordinator.errors import Reason, SlackwaterError
from coordinator.keys import CoordinatorKeys
from coordinator.scheduler import events as e
from coordinator.scheduler.driver import SchedulerDriver
from coordinator.store.port import Store
from coordinator.tasks_port import (
    Accepted,
    AttemptSummary,
    ModelInfo,
    SamplingRequest,
    TaskRequest,
    TaskSummary,
)
from inference.failover import resumable
from inference.manifest import Manifest
from inference.task import PrivacyClass, Sampling, TaskId, TaskKind, TaskSpec, TenantId, token_array
from inference.text import Message, TemplateError, Tokenizer

# Longer texts are tokenized in a thread: about a millisecond's worth.
INLINE_CHARACTERS_MAX = 4_000
# How long an ended answer can still be attached (DESIGN section 4), and how often
# those are looked for that have been kept for so long.
RETENTION_S = 600.0
FORGET_INTERVAL_S = 10.0
# Where that is too much to keep, the oldest go earlier: answers, and their ids with
# alternatives counted (some 220 bytes each).
RETAINED_ANSWERS_MAX = 10_000
RETAINED_IDS_MAX = 2_000_000
STOP_STRINGS_MAX = 4
STOP_STRING_BYTES_MAX = 256
LOGPROBS_MAX = 20
SEED_MAX = 2**63 - 1

# The number of the coordinator's start, and what makes the id unguessable.
TASK_ID = re.compile(r"task-([0-9a-f]{6,16})-[0-9a-f]{20}")

# How an ended task's outcome, as stored, is told.
ROW_STATUS = {"stop": "finished", "length": "finished", "task_cancelled": "cancelled"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A registered manifest with its text side loaded."""

    manifest: Manifest
    tokenizer: Tokenizer
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """An answer that can be attached."""

    tenant_id: TenantId
    answer: LiveAnswer
    # What one id weighs: itself, and its alternatives.
    ids_per_token: int


@dataclass(frozen=True, slots=True)
class _Ended:
    task_id: TaskId
    ended_at: float
    ids: int


class LocalTasks:
    """Implements coordinator.tasks_port.Tasks in the coordinator's own process."""

    def __init__(
        self, driver: SchedulerDriver, store: Store, keys: CoordinatorKeys, clock: Clock, boot_number: int
    ) -> None:
        self._driver = driver
        self._store = store
        self._keys = keys
        self._clock = clock
        # Part of every task id, so that an id of an earlier start is known as one.
        self._boot_number = boot_number
        self._models: dict[str, ServedModel] = {}
        self._kept: dict[TaskId, _Kept] = {}
        # Those of `_kept` that have ended, in that order, and the sum of their ids.
        self._ended: deque[_Ended] = deque()
        self._ended_ids = 0
        self._stopping = False

    async def run(self) -> None:
        """Forget ended answers in time, for ever."""
        while True:
            await asyncio.sleep(FORGET_INTERVAL_S)
            self.forget_ended()

    def add_model(self, manifest: Manifest, tokenizer_directory: Path, created_at_ms: int) -> None:
        """Serve a model under its public name; a newer revision replaces an older. Blocks: loads a tokenizer."""
        tokenizer = Tokenizer.load(tokenizer_directory)
        self._models[manifest.name] = ServedModel(manifest, tokenizer, created_at_ms)

    def models(self) -> list[ModelInfo]:
        return [
            ModelInfo(
                name=model.manifest.name,
                revision=model.manifest.revision,
                manifest_digest=model.manifest.digest,
                licence=model.manifest.licence,
                kind=model.manifest.kind,
                context_tokens=model.manifest.context_tokens,
                engines_ready=self._driver.scheduler.engines_ready(model.manifest.digest),
                created_at_ms=model.created_at_ms,
            )
            for model in self._models.values()
        ]

    def ready(self) -> bool:
        return not self._stopping and any(model.engines_ready for model in self.models())

    def stop(self) -> None:
        """Admit nothing more and end every answer with an error event."""
        self._stopping = True
        self._driver.stop("the coordinator is stopping; submit again when it is back")

    async def submit(self, tenant_id: TenantId, request: TaskRequest) -> LiveAnswer:
        model = self._find_model(request.model)
        prompt_ids = await self._prompt_ids(model, request)
        if self._stopping:
            raise SlackwaterError(Reason.COORDINATOR_STOPPING, "the coordinator is stopping; submit again later")
        task_id = TaskId(f"task-{self._boot_number:06x}-{secrets.token_hex(10)}")
        spec = self._specify(task_id, tenant_id, request, model.manifest, prompt_ids)
        answer = LiveAnswer(
            accepted=Accepted(
                task_id=task_id,
                model=request.model,
                manifest_digest=model.manifest.digest,
                prompt_tokens=len(prompt_ids),
                resumable=resumable(spec),
                seed=spec.sampling.seed,
            ),
            tokenizer=model.tokenizer,
            stop=request.stop,
            streaming=request.streaming,
            detach_grace_s=request.detach_grace_s,
            call_later=asyncio.get_running_loop().call_later,
            on_stop_string=lambda count: self._driver.feed(e.TaskStopped(task_id, count)),
            on_abandoned=lambda: self._driver.feed(e.TaskCancelled(task_id)),
            on_ended=lambda: self._retain(task_id),
        )
        if request.detach_grace_s:
            self._kept[task_id] = _Kept(tenant_id, answer, ids_per_token=1 + (request.sampling.logprobs or 0))
        self._driver.submit(spec, answer)
        return answer

    def attach(self, tenant_id: TenantId, task_id: TaskId) -> LiveAnswer:
        kept = self._kept.get(task_id)
        if kept is not None and kept.tenant_id == tenant_id:
            return kept.answer
        raise self._unknown_task(task_id)

    def cancel(self, tenant_id: TenantId, task_id: TaskId) -> None:
        self.attach(tenant_id, task_id)
        self._driver.feed(e.TaskCancelled(task_id))

    async def summarize(self, tenant_id: TenantId, task_id: TaskId) -> TaskSummary:
        kept = self._kept.get(task_id)
        if kept is not None and kept.tenant_id == tenant_id:
            return kept.answer.summary()
        row = await asyncio.to_thread(self._store.find_task, task_id)
        if row is None or row.tenant_id != tenant_id:
            raise self._unknown_task(task_id)
        attempts = await asyncio.to_thread(self._store.attempts, task_id)
        return TaskSummary(
            task_id=task_id,
            status=ROW_STATUS.get(row.outcome, "failed"),
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            attempts=tuple(
                AttemptSummary(
                    attempt=attempt.attempt,
                    node_id=attempt.node_id,
                    first_index=attempt.first_index,
                    delivered_tokens=attempt.delivered_tokens,
                    outcome=attempt.outcome,
                    signed=attempt.statement is not None,
                )
                for attempt in attempts
            ),
            error=None,
        )

    def forget_ended(self) -> None:
        """Forget the answers that ended long ago or are too many, oldest first."""
        now = self._clock.monotonic()
        while self._ended and (
            now - self._ended[0].ended_at >= RETENTION_S
            or len(self._ended) > RETAINED_ANSWERS_MAX
            or self._ended_ids > RETAINED_IDS_MAX
        ):
            oldest = self._ended.popleft()
            self._ended_ids -= oldest.ids
            del self._kept[oldest.task_id]

    def _retain(self, task_id: TaskId) -> None:
        kept = self._kept.get(task_id)
        if kept is None:
            return  # Nobody may come back for it.
        ended = _Ended(task_id, self._clock.monotonic(), kept.answer.token_count * kept.ids_per_token)
        self._ended.append(ended)
        self._ended_ids += ended.ids
        self.forget_ended()

    def _unknown_task(self, task_id: TaskId) -> SlackwaterError:
        parts = TASK_ID.fullmatch(task_id)
        if parts is not None and int(parts[1], 16) < self._boot_number:
            return SlackwaterError(
                Reason.COORDINATOR_RESTARTED,
                f"task {task_id} was lost when the coordinator restarted; submit it again",
                param="task_id",
            )
        return SlackwaterError(
            Reason.TASK_NOT_FOUND,
            f"no task {task_id[:64]!r} of this API key is known; ended tasks are kept for {RETENTION_S:g} s at most",
            param="task_id",
        )

    # --- admission -------------------------------------------------------------------------

    def _find_model(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is None:
            known = ", ".join(sorted(self._models)) or "none yet"
            raise SlackwaterError(
                Reason.MODEL_NOT_FOUND, f"the model {name[:64]!r} does not exist; known models: {known}", param="model"
            )
        return model

    async def _prompt_ids(self, model: ServedModel, request: TaskRequest) -> "array[int]":
        if _size(request.input) > INLINE_CHARACTERS_MAX:
            ids = await asyncio.to_thread(_encode, model, request)
        else:
            ids = _encode(model, request)
        if not ids:
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT, "the prompt is empty; give at least one token", param="prompt"
            )
        return ids

    def _specify(
        self,
        task_id: TaskId,
        tenant_id: TenantId,
        request: TaskRequest,
        manifest: Manifest,
        prompt_ids: "array[int]",
    ) -> TaskSpec:
        if request.kind is not manifest.kind and TaskKind.EMBED in (request.kind, manifest.kind):
            raise SlackwaterError(
                Reason.UNSUPPORTED, f"the model {request.model!r} does not {request.kind.value}", param="model"
            )
        if request.privacy_class is PrivacyClass.OWN_NODES:
            raise SlackwaterError(
                Reason.UNSUPPORTED, "own_nodes needs an API key that belongs to an owner of nodes", param="privacy"
            )
        if request.deadline_s is not None and not 0 < request.deadline_s < math.inf:
            raise SlackwaterError(Reason.INVALID_ARGUMENT, "the deadline must be positive", param="deadline_ms")
        _check_stop(request.stop)
        return TaskSpec(
            task_id=task_id,
            tenant_id=tenant_id,
            kind=request.kind,
            model=request.model,
            manifest_digest=manifest.digest,
            prompt_ids=prompt_ids,
            sampling=_sampling(request.sampling, self._keys.derive_seed(task_id)),
            max_tokens=_max_tokens(request, manifest, len(prompt_ids)),
            stop_token_ids=tuple(manifest.stop_token_ids),
            vocabulary_size=manifest.vocabulary_size,
            service_class=request.service_class,
            privacy_class=request.privacy_class,
            streaming=request.streaming,
            deadline_s=request.deadline_s,
        )


def _size(given: tuple[Message, ...] | str | tuple[int, ...]) -> int:
    """Return characters, or ids. Of more parts than `INLINE_CHARACTERS_MAX` their count will do."""
    if isinstance(given, str) or len(given) > INLINE_CHARACTERS_MAX:
        return len(given)
    return sum(len(part.content) if isinstance(part, Message) else 1 for part in given)


def _encode(model: ServedModel, request: TaskRequest) -> "array[int]":
    given = request.input
    param = "prompt" if isinstance(given, str) else "messages"
    try:
        if isinstance(given, str):
            return model.tokenizer.encode(given)
        messages = [part for part in given if isinstance(part, Message)]
        if messages:
            return model.tokenizer.encode_chat(messages)
    except TemplateError as error:
        message = f"the chat template of {request.model!r} refused the messages: {error}"
        raise SlackwaterError(Reason.INVALID_ARGUMENT, message, param=param) from error
    except ValueError as error:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, str(error), param=param) from error
    return _checked_ids([part for part in given if isinstance(part, int)], model.manifest.vocabulary_size)


def _checked_ids(ids: list[int], vocabulary_size: int) -> "array[int]":
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocabulary_size:
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                f"token id {token_id} is outside the vocabulary of {vocabulary_size} ids",
                param=f"prompt[{position}]",
            )
    return token_array(ids)


def _max_tokens(request: TaskRequest, manifest: Manifest, prompt_tokens: int) -> int:
    room = manifest.context_tokens - prompt_tokens
    chat = bool(request.input) and isinstance(request.input[0], Message)
    param = "messages" if chat else "prompt"
    if request.kind is not TaskKind.GENERATE:
        if room < 0:
            raise _context_exceeded(manifest, prompt_tokens, 0, param)
        return 0
    if request.max_tokens is not None and request.max_tokens < 1:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, "max_tokens must be at least 1", param="max_tokens")
    if room < 1:
        raise _context_exceeded(manifest, prompt_tokens, 1, param)
    if request.max_tokens is not None and request.max_tokens > room:
        raise _context_exceeded(manifest, prompt_tokens, request.max_tokens, "max_tokens")
    return request.max_tokens or room


def _context_exceeded(manifest: Manifest, prompt_tokens: int, asked: int, param: str) -> SlackwaterError:
    return SlackwaterError(
        Reason.CONTEXT_EXCEEDED,
        f"the model's context is {manifest.context_tokens} tokens; the prompt has {prompt_tokens} and "
        f"{asked} more were asked for; shorten the prompt or lower max_tokens",
        param=param,
    )


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > STOP_STRINGS_MAX:
        raise SlackwaterError(
            Reason.INVALID_ARGUMENT, f"at most {STOP_STRINGS_MAX} stop strings are taken, not {len(stop)}", param="stop"
        )
    for position, text in enumerate(stop):
        if not text or len(text.encode(errors="replace")) > STOP_STRING_BYTES_MAX:
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                f"a stop string has 1 to {STOP_STRING_BYTES_MAX} bytes",
                param=f"stop[{position}]",
            )


# Field, neutral value, smallest, largest, whether the smallest is allowed.
_SAMPLING_RANGES: tuple[tuple[str, float, float, float, bool], ...] = (
    ("temperature", 1.0, 0.0, 2.0, True),
    ("top_p", 1.0, 0.0, 1.0, False),
    ("top_k", 0, 0, 2**31 - 1, True),
    ("presence_penalty", 0.0, -2.0, 2.0, True),
    ("frequency_penalty", 0.0, -2.0, 2.0, True),
    ("repetition_penalty", 1.0, 0.0, 2.0, False),
)


def _sampling(request: SamplingRequest, derived_seed: int) -> Sampling:
    values: dict[str, float] = {}
    for name, neutral, low, high, low_allowed in _SAMPLING_RANGES:
        value = getattr(request, name)
        if value is None:
            value = neutral
        # NaN fails every comparison, and so is refused here too.
        if not (low <= value <= high) or (value == low and not low_allowed):
            bracket = "[" if low_allowed else "("
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT, f"{name} must lie in {bracket}{low:g}, {high:g}]", param=name
            )
        values[name] = value
    if request.seed is not None and not 0 <= request.seed <= SEED_MAX:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, f"seed must lie in [0, {SEED_MAX}]", param="seed")
    if request.logprobs is not None and not 0 <= request.logprobs <= LOGPROBS_MAX:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, f"logprobs must lie in [0, {LOGPROBS_MAX}]", param="logprobs")
    return Sampling(
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=int(values["top_k"]),
        seed=derived_seed if request.seed is None else request.seed,
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        repetition_penalty=values["repetition_penalty"],
        logprobs=request.logprobs,
    )
