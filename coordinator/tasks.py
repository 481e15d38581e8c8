"""Takes tasks and keeps their answers: the coordinator's side of tasks_port.

A task is admitted (coordinator/admission.py; off the event loop where that
could take more than a moment) and handed to the scheduler's driver, with a
`LiveAnswer` as its sink.
"""

import asyncio
import re
import secrets
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from coordinator.admission import ServedModel, check_price, specify, unwritten_prompt
from coordinator.answers import LiveAnswer
from coordinator.clock import Clock
from coordinator.errors import Reason, SlackwaterError
from coordinator.keys import CoordinatorKeys
from coordinator.prompt_encoder import PromptEncoder
from coordinator.quotes import Quotes
from coordinator.scheduler import events as e
from coordinator.scheduler.decisions import decision_in, milliseconds, waiting_summary
from coordinator.scheduler.driver import SchedulerDriver
from coordinator.stated_energy import StatedEnergy
from coordinator.store.port import Store
from coordinator.tasks_port import (
    Accepted,
    AttemptSummary,
    Finished,
    ModelInfo,
    QuoteRequest,
    TaskQuote,
    TaskRequest,
    TaskSummary,
)
from inference.failover import resumable
from inference.manifest import Manifest
from inference.task import ManifestDigest, TaskId, TaskKind, TaskSpec, TenantId
from inference.text import Tokenizer

# How long an ended answer can still be attached (DESIGN section 4), and how often
# those are looked for that have been kept for so long.
RETENTION_S = 600.0
FORGET_INTERVAL_S = 10.0
# Where that is too much to keep, the oldest go earlier: answers, and their ids with
# alternatives counted (some 220 bytes each).
RETAINED_ANSWERS_MAX = 10_000
RETAINED_IDS_MAX = 2_000_000

# The number of the coordinator's start, and what makes the id unguessable.
TASK_ID = re.compile(r"task-([0-9a-f]{6,16})-[0-9a-f]{20}")

# How an ended task's outcome, as stored, is told.
ROW_STATUS = {"stop": "finished", "length": "finished", "task_cancelled": "cancelled"}


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
    """Implements coordinator.tasks_port.Tasks in the coordinator's own process.

    Args:
        reserve: sets aside what a task may cost; raises SlackwaterError where the tenant has too little.
        on_asked: told of every task, whatever becomes of it: which model, and how long its answer is likely to be.
    """

    def __init__(
        self,
        driver: SchedulerDriver,
        store: Store,
        keys: CoordinatorKeys,
        clock: Clock,
        boot_number: int,
        reserve: Callable[[TaskSpec], None],
        quotes: Quotes,
        on_asked: Callable[[ManifestDigest, int], None],
    ) -> None:
        self._driver = driver
        self._reserve = reserve
        self._quotes = quotes
        self._on_asked = on_asked
        self._encoder = PromptEncoder()
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

    def add_model(self, manifest: Manifest, tokenizer: Tokenizer, created_at_ms: int) -> None:
        """Serve a model under its public name; a newer revision replaces an older."""
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
        seed = self._keys.derive_seed(task_id)
        spec = specify(task_id, tenant_id, request, model.manifest, prompt_ids, seed)
        check_price(spec, self._quotes.price(spec.model), request.max_price_micro)
        # From here on nothing awaits or fails: what is reserved for a task is settled at the task's end.
        self._reserve(spec)
        answer = LiveAnswer(
            accepted=Accepted(
                task_id=task_id,
                model=request.model,
                manifest_digest=model.manifest.digest,
                prompt_tokens=len(prompt_ids),
                resumable=resumable(spec),
                seed=spec.sampling.seed,
                coordinator_public_keys=(self._keys.signing_public_key,),
            ),
            tokenizer=model.tokenizer,
            stop=request.stop,
            streaming=request.streaming,
            detach_grace_s=request.detach_grace_s,
            call_later=asyncio.get_running_loop().call_later,
            on_stop_string=lambda count: self._driver.feed(e.TaskStopped(task_id, count)),
            on_abandoned=lambda: self._driver.feed(e.TaskCancelled(task_id)),
            on_ended=lambda: self._ended_now(spec, answer),
        )
        if request.detach_grace_s:
            self._kept[task_id] = _Kept(tenant_id, answer, ids_per_token=1 + (request.sampling.logprobs or 0))
        self._on_asked(spec.manifest_digest, self._quotes.lengths.likely(spec.manifest_digest, spec.max_tokens))
        self._driver.submit(spec, answer)
        return answer

    async def quote(self, tenant_id: TenantId, request: QuoteRequest) -> TaskQuote:
        model = self._find_model(request.task.model)
        if request.prompt_tokens is None:
            prompt_ids = await self._prompt_ids(model, request.task)
        else:
            prompt_ids = unwritten_prompt(request.prompt_tokens, model.manifest)
        # It gets no id of its own, and draws nothing.
        spec = specify(TaskId(""), tenant_id, request.task, model.manifest, prompt_ids, derived_seed=0)
        return self._quotes.of(spec)

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
            return self._as_it_stands(kept.answer.summary())
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
                    energy=None
                    if attempt.energy_mj is None or attempt.energy_method is None
                    else StatedEnergy(attempt.energy_mj, attempt.energy_method),
                    decision=decision_in(attempt),
                    first_token_ms=attempt.first_token_ms,
                )
                for attempt in attempts
            ),
            error=None,
        )

    def _as_it_stands(self, summary: TaskSummary) -> TaskSummary:
        """Add what only the scheduler knows of a task that has not ended: what it waits for, when its answer began."""
        scheduler = self._driver.scheduler
        task = scheduler.tasks.get(summary.task_id)
        if task is None:
            return summary
        if task.attempt is None:
            waiting = waiting_summary(scheduler.waiting_for(summary.task_id, self._clock.monotonic()))
            return replace(summary, waiting=waiting)
        running = replace(summary.attempts[-1], first_token_ms=milliseconds(task.attempt.first_token_s))
        return replace(summary, attempts=(*summary.attempts[:-1], running))

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

    def _ended_now(self, spec: TaskSpec, answer: LiveAnswer) -> None:
        if isinstance(answer.outcome, Finished) and spec.kind is TaskKind.GENERATE:
            self._quotes.lengths.ended(spec.manifest_digest, answer.token_count)
        self._retain(spec.task_id)

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
        ids = await self._encoder.encode(model, request)
        if not ids:
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT, "the prompt is empty; give at least one token", param="prompt"
            )
        return ids
