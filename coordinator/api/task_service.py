"""TaskService: converts between the wire and coordinator.tasks_port, and nothing else."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import TypeVar

import grpc

from coordinator.api.completion import (
    FINISH_REASON_TO_WIRE,
    KIND_FROM_WIRE,
    KIND_TO_WIRE,
    PRIVACY_CLASS_FROM_WIRE,
    SERVICE_CLASS_FROM_WIRE,
    SERVICE_CLASS_TO_WIRE,
    logprobs_to_wire,
)
from coordinator.api.identity import tenant
from coordinator.errors import Reason, SlackwaterError
from coordinator.ledger.receipts import ReceiptDesk
from coordinator.tasks_port import (
    Accepted,
    AnswerEvent,
    AttemptBroken,
    AttemptStarted,
    Delta,
    Failed,
    Finished,
    ModelInfo,
    QuoteRequest,
    SamplingRequest,
    TaskQuote,
    TaskRequest,
    Tasks,
    TaskSummary,
)
from inference.task import PrivacyClass, ServiceClass, TaskId, TaskKind
from inference.text import Message
from protos.slackwater.common.v1 import completion_pb2
from protos.slackwater.task.v1 import task_service_pb2 as wire
from protos.slackwater.task.v1 import task_service_pb2_grpc

# A broken stream leaves its task running this long (DESIGN section 4).
DETACH_GRACE_S = 30.0
MESSAGES_MAX = 2_048
_Wire = TypeVar("_Wire")
_Domain = TypeVar("_Domain")
ROLES = ("system", "user", "assistant")


class TaskServicer(task_service_pb2_grpc.TaskServiceServicer):
    def __init__(self, tasks: Tasks, receipts: ReceiptDesk) -> None:
        self._tasks = tasks
        self._receipts = receipts

    async def SubmitTask(
        self,
        request: wire.SubmitTaskRequest,
        context: grpc.aio.ServicerContext[wire.SubmitTaskRequest, wire.SubmitTaskResponse],
    ) -> AsyncIterator[wire.SubmitTaskResponse]:
        answer = await self._tasks.submit(tenant(), request_from_wire(request))
        async with aclosing(answer.follow()) as batches:
            async for batch in batches:
                for event in batch:
                    yield wire.SubmitTaskResponse(event=event_to_wire(event))

    async def AttachTask(
        self,
        request: wire.AttachTaskRequest,
        context: grpc.aio.ServicerContext[wire.AttachTaskRequest, wire.AttachTaskResponse],
    ) -> AsyncIterator[wire.AttachTaskResponse]:
        answer = self._tasks.attach(tenant(), TaskId(request.task_id))
        async with aclosing(answer.follow(request.from_index)) as batches:
            async for batch in batches:
                for event in batch:
                    yield wire.AttachTaskResponse(event=event_to_wire(event))

    async def CancelTask(
        self,
        request: wire.CancelTaskRequest,
        context: grpc.aio.ServicerContext[wire.CancelTaskRequest, wire.CancelTaskResponse],
    ) -> wire.CancelTaskResponse:
        self._tasks.cancel(tenant(), TaskId(request.task_id))
        return wire.CancelTaskResponse()

    async def GetTask(
        self,
        request: wire.GetTaskRequest,
        context: grpc.aio.ServicerContext[wire.GetTaskRequest, wire.GetTaskResponse],
    ) -> wire.GetTaskResponse:
        summary = await self._tasks.summarize(tenant(), TaskId(request.task_id))
        return _summary_to_wire(summary)

    async def GetCheckpoint(
        self,
        request: wire.GetCheckpointRequest,
        context: grpc.aio.ServicerContext[wire.GetCheckpointRequest, wire.GetCheckpointResponse],
    ) -> wire.GetCheckpointResponse:
        update = await self._receipts.update(request.old_size)
        return wire.GetCheckpointResponse(update=update)

    async def GetReceipt(
        self,
        request: wire.GetReceiptRequest,
        context: grpc.aio.ServicerContext[wire.GetReceiptRequest, wire.GetReceiptResponse],
    ) -> wire.GetReceiptResponse:
        receipts = await self._receipts.for_tenant(tenant(), TaskId(request.task_id))
        return wire.GetReceiptResponse(receipts=receipts)

    async def Quote(
        self,
        request: wire.QuoteRequest,
        context: grpc.aio.ServicerContext[wire.QuoteRequest, wire.QuoteResponse],
    ) -> wire.QuoteResponse:
        quote = await self._tasks.quote(tenant(), quote_request_from_wire(request))
        return quote_to_wire(quote)

    async def ListModels(
        self,
        request: wire.ListModelsRequest,
        context: grpc.aio.ServicerContext[wire.ListModelsRequest, wire.ListModelsResponse],
    ) -> wire.ListModelsResponse:
        return wire.ListModelsResponse(models=[_model_to_wire(model) for model in self._tasks.models()])

    async def OpenSession(
        self,
        request: wire.OpenSessionRequest,
        context: grpc.aio.ServicerContext[wire.OpenSessionRequest, wire.OpenSessionResponse],
    ) -> wire.OpenSessionResponse:
        raise SlackwaterError(
            Reason.UNSUPPORTED, "the direct path between client and node is not offered yet; use SubmitTask"
        )


def request_from_wire(request: wire.SubmitTaskRequest) -> TaskRequest:
    """Convert; raise SlackwaterError where the wire allows what a request does not."""
    return _request_from_wire(request, _input_from_wire(request))


def quote_request_from_wire(request: wire.QuoteRequest) -> QuoteRequest:
    """Convert; raise SlackwaterError as `request_from_wire`, and where the prompt is given twice."""
    if not request.prompt_tokens:
        return QuoteRequest(task=request_from_wire(request.task))
    if request.task.WhichOneof("input") is not None:
        raise SlackwaterError(
            Reason.INVALID_ARGUMENT, "give an input or prompt_tokens, not both", param="prompt_tokens"
        )
    return QuoteRequest(task=_request_from_wire(request.task, ()), prompt_tokens=request.prompt_tokens)


def _request_from_wire(
    request: wire.SubmitTaskRequest, input_: tuple[Message, ...] | str | tuple[int, ...]
) -> TaskRequest:
    return TaskRequest(
        model=request.model,
        input=input_,
        kind=_known(KIND_FROM_WIRE, request.kind, TaskKind.GENERATE, "kind"),
        sampling=_sampling_from_wire(request.sampling),
        max_tokens=request.max_tokens or None,
        stop=tuple(request.stop),
        service_class=_known(SERVICE_CLASS_FROM_WIRE, request.service_class, ServiceClass.INTERACTIVE, "service_class"),
        privacy_class=_known(PRIVACY_CLASS_FROM_WIRE, request.privacy_class, PrivacyClass.PUBLIC, "privacy_class"),
        deadline_s=request.deadline_ms / 1000 if request.deadline_ms else None,
        max_ttft_ms=request.max_ttft_ms or None,
        max_price_micro=request.max_price_micro or None,
        detach_grace_s=DETACH_GRACE_S,
    )


def _known(table: dict[_Wire, _Domain], value: _Wire, default: _Domain, param: str) -> _Domain:
    if not value:
        return default
    if value not in table:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, f"{param} has no value {value}", param=param)
    return table[value]


def _input_from_wire(request: wire.SubmitTaskRequest) -> tuple[Message, ...] | str | tuple[int, ...]:
    match request.WhichOneof("input"):
        case "chat":
            messages = request.chat.messages
            if not 1 <= len(messages) <= MESSAGES_MAX:
                raise SlackwaterError(
                    Reason.INVALID_ARGUMENT, f"a chat has 1 to {MESSAGES_MAX} messages", param="messages"
                )
            for position, message in enumerate(messages):
                if message.role not in ROLES:
                    raise SlackwaterError(
                        Reason.INVALID_ARGUMENT,
                        f"a role is one of {', '.join(ROLES)}",
                        param=f"messages[{position}].role",
                    )
            return tuple(Message(message.role, message.content) for message in messages)
        case "text":
            return request.text
        case "token_ids":
            return tuple(request.token_ids.ids)
        case _:
            raise SlackwaterError(Reason.INVALID_ARGUMENT, "give a chat, a text or token ids as input", param="input")


def _sampling_from_wire(sampling: wire.SamplingRequest) -> SamplingRequest:
    def given(name: str, value: _Domain) -> _Domain | None:
        return value if sampling.HasField(name) else None  # type: ignore[arg-type]  # the stub lists the names

    return SamplingRequest(
        temperature=given("temperature", sampling.temperature),
        top_p=given("top_p", sampling.top_p),
        top_k=given("top_k", sampling.top_k),
        seed=given("seed", sampling.seed),
        presence_penalty=given("presence_penalty", sampling.presence_penalty),
        frequency_penalty=given("frequency_penalty", sampling.frequency_penalty),
        repetition_penalty=given("repetition_penalty", sampling.repetition_penalty),
        logprobs=given("logprobs", sampling.logprobs),
    )


def event_to_wire(event: AnswerEvent) -> wire.TaskEvent:
    match event:
        case Delta():
            return wire.TaskEvent(
                delta=wire.Delta(
                    first_index=event.first_index,
                    token_ids=event.token_ids,
                    text=event.text,
                    logprobs=logprobs_to_wire(event.logprobs),
                )
            )
        case Accepted():
            return wire.TaskEvent(
                accepted=wire.TaskAccepted(
                    task_id=event.task_id,
                    model=event.model,
                    manifest_digest=event.manifest_digest,
                    prompt_tokens=event.prompt_tokens,
                    resumable=event.resumable,
                    seed=event.seed,
                    coordinator_public_keys=event.coordinator_public_keys,
                )
            )
        case AttemptStarted():
            return wire.TaskEvent(
                attempt_started=wire.AttemptStarted(
                    attempt=event.attempt, node_id=event.node_id, first_index=event.first_index
                )
            )
        case AttemptBroken():
            return wire.TaskEvent(
                attempt_broken=wire.AttemptBroken(
                    attempt=event.attempt,
                    node_id=event.node_id,
                    reason=event.reason,
                    delivered_tokens=event.delivered_tokens,
                )
            )
        case Finished():
            return wire.TaskEvent(finished=_finished_to_wire(event))
        case Failed():
            return wire.TaskEvent(failed=event.error.to_proto())


def _finished_to_wire(event: Finished) -> wire.TaskFinished:
    return wire.TaskFinished(
        finish_reason=FINISH_REASON_TO_WIRE[event.finish_reason],
        usage=completion_pb2.Usage(prompt_tokens=event.prompt_tokens, completion_tokens=event.completion_tokens),
        header=event.header,
        statement=event.statement,
        node_public_key=event.node_public_key,
        embedding=event.embedding,
        scores=logprobs_to_wire(event.scores),
    )


def _summary_to_wire(summary: TaskSummary) -> wire.GetTaskResponse:
    return wire.GetTaskResponse(
        task_id=summary.task_id,
        status=summary.status,
        usage=completion_pb2.Usage(prompt_tokens=summary.prompt_tokens, completion_tokens=summary.completion_tokens),
        attempts=[
            wire.AttemptRecord(
                attempt=attempt.attempt,
                node_id=attempt.node_id,
                first_index=attempt.first_index,
                delivered_tokens=attempt.delivered_tokens,
                outcome=attempt.outcome,
                signed=attempt.signed,
                energy_mj=attempt.energy.energy_mj if attempt.energy else None,
                energy_method=attempt.energy.method if attempt.energy else "",
                decision=wire.Decision(**asdict(attempt.decision)) if attempt.decision else None,
                first_token_ms=attempt.first_token_ms,
            )
            for attempt in summary.attempts
        ],
        error=summary.error.to_proto() if summary.error else None,
        waiting=wire.Waiting(**asdict(summary.waiting)) if summary.waiting else None,
    )


def quote_to_wire(quote: TaskQuote) -> wire.QuoteResponse:
    return wire.QuoteResponse(
        model=quote.model,
        prompt_tokens=quote.prompt_tokens,
        max_tokens=quote.max_tokens,
        likely_tokens=quote.likely_tokens,
        max_price_micro=quote.max_price_micro,
        likely_price_micro=quote.likely_price_micro,
        grid_grams_per_kwh=quote.grid_grams_per_kwh,
        classes=[
            wire.ClassQuote(
                service_class=SERVICE_CLASS_TO_WIRE[one.service_class],
                target_met=one.target_met,
                wait_ms=one.wait_ms,
                first_token_ms=one.first_token_ms,
                token_ms=one.token_ms,
                joules=one.joules,
                energy_method=one.energy_method,
                co2_g=one.co2_g,
            )
            for one in quote.classes
        ],
    )


def _model_to_wire(model: ModelInfo) -> wire.Model:
    return wire.Model(
        name=model.name,
        revision=model.revision,
        manifest_digest=model.manifest_digest,
        licence=model.licence,
        context_tokens=model.context_tokens,
        engines_ready=model.engines_ready,
        created_at_ms=model.created_at_ms,
        kind=KIND_TO_WIRE[model.kind],
    )
