"""Wire messages of tasks to this package's values and back, one function per type."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from slackwater import errors
from slackwater._protos.slackwater.common.v1 import completion_pb2, envelope_pb2, error_pb2
from slackwater._protos.slackwater.task.v1 import task_service_pb2
from slackwater.events import (
    Accepted,
    AttemptBroken,
    AttemptRecord,
    AttemptStarted,
    ClassQuote,
    Decision,
    Delta,
    Event,
    Finished,
    FinishReason,
    Message,
    Model,
    PositionLogprobs,
    Quote,
    ServiceClass,
    Signature,
    SignedEnvelope,
    Task,
    TaskError,
    TaskOptions,
    TokenLogprob,
    Usage,
    Waiting,
)

Turn = Message | Mapping[str, str]


def error_from_proto(detail: error_pb2.ErrorDetail) -> errors.SlackwaterError:
    """Return the exception that a coordinator describes; an unknown reason falls back to its actor."""
    reason = _enum_name(error_pb2.ErrorReason, detail.reason, "ERROR_REASON_")
    actor = _enum_name(error_pb2.ErrorActor, detail.actor, "ERROR_ACTOR_")
    kind = errors.ERROR_BY_REASON.get(reason) or errors.ERROR_BY_ACTOR.get(actor) or errors.OperatorError
    return kind(
        detail.message or f"the coordinator answered {reason} without a message",
        reason=reason,
        param=detail.param or None,
        retry_after_s=detail.retry_after_ms / 1000 if detail.retry_after_ms else None,
    )


def chat_request(
    model: str, messages: str | Sequence[Turn], options: TaskOptions
) -> task_service_pb2.SubmitTaskRequest:
    """Build a request; ranges are the coordinator's to judge, only what cannot be written down is refused here.

    Raises:
        InvalidArgument: a value has the wrong type or does not fit its field; `param` names it.
    """
    request = _request(model, options)
    request.chat.SetInParent()
    for index, turn in enumerate(_turns(messages)):
        message = request.chat.messages.add()
        _put(message, "role", turn.role, f"messages[{index}].role")
        _put(message, "content", turn.content, f"messages[{index}].content")
    return request


def completion_request(
    model: str, prompt: str | Sequence[int], options: TaskOptions
) -> task_service_pb2.SubmitTaskRequest:
    """Build a request from a text or ids; as `chat_request`."""
    request = _request(model, options)
    if isinstance(prompt, str):
        _put(request, "text", prompt, "prompt")
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, prompt, "prompt")
    return request


def quote_request(
    model: str,
    messages: str | Sequence[Turn] | None,
    prompt: str | Sequence[int] | None,
    prompt_tokens: int | None,
    options: TaskOptions,
) -> task_service_pb2.QuoteRequest:
    """Build a request from a chat, a text or ids, or the length of a prompt, as `chat_request`.

    Raises:
        InvalidArgument: none of the three is given, or more than one.
    """
    given = [value for value in (messages, prompt, prompt_tokens) if value is not None]
    if len(given) != 1:
        raise errors.InvalidArgument("give one of messages, prompt and prompt_tokens", param="messages")
    request = task_service_pb2.QuoteRequest()
    if messages is not None:
        request.task.CopyFrom(chat_request(model, messages, options))
    elif prompt is not None:
        request.task.CopyFrom(completion_request(model, prompt, options))
    else:
        request.task.CopyFrom(_request(model, options))
        if prompt_tokens == 0:
            raise errors.InvalidArgument("prompt_tokens must be at least 1", param="prompt_tokens")
        _put(request, "prompt_tokens", prompt_tokens)
    return request


def quote_from_proto(quote: task_service_pb2.QuoteResponse) -> Quote:
    return Quote(
        model=quote.model,
        prompt_tokens=quote.prompt_tokens,
        max_tokens=quote.max_tokens,
        likely_tokens=quote.likely_tokens,
        max_price_micro=quote.max_price_micro,
        likely_price_micro=quote.likely_price_micro,
        grid_grams_per_kwh=quote.grid_grams_per_kwh,
        classes=tuple(_class_quote_from_proto(one) for one in quote.classes),
    )


def _class_quote_from_proto(one: task_service_pb2.ClassQuote) -> ClassQuote:
    name = _enum_name(completion_pb2.ServiceClass, one.service_class, "SERVICE_CLASS_").lower()
    return ClassQuote(
        service_class=cast(ServiceClass, name),
        target_met=one.target_met,
        wait_ms=one.wait_ms if one.HasField("wait_ms") else None,
        first_token_ms=one.first_token_ms if one.HasField("first_token_ms") else None,
        token_ms=one.token_ms if one.HasField("token_ms") else None,
        joules=one.joules if one.HasField("joules") else None,
        energy_method=one.energy_method,
        co2_g=one.co2_g if one.HasField("co2_g") else None,
    )


def attach_request(task_id: str, from_index: int) -> task_service_pb2.AttachTaskRequest:
    request = task_service_pb2.AttachTaskRequest()
    _put(request, "task_id", task_id)
    _put(request, "from_index", from_index)
    return request


def event_from_proto(event: task_service_pb2.TaskEvent) -> Event | errors.SlackwaterError:
    """Return the event, or the error with which the task failed.

    Raises:
        MalformedAnswer: the event is of a kind that this version does not know.
    """
    match event.WhichOneof("event"):
        case "accepted":
            accepted = event.accepted
            return Accepted(
                task_id=accepted.task_id,
                model=accepted.model,
                manifest_digest=accepted.manifest_digest,
                prompt_tokens=accepted.prompt_tokens,
                resumable=accepted.resumable,
                seed=accepted.seed,
                coordinator_public_keys=tuple(accepted.coordinator_public_keys),
            )
        case "attempt_started":
            started = event.attempt_started
            return AttemptStarted(attempt=started.attempt, node_id=started.node_id, first_index=started.first_index)
        case "attempt_broken":
            broken = event.attempt_broken
            return AttemptBroken(
                attempt=broken.attempt,
                node_id=broken.node_id,
                reason=broken.reason,
                delivered_tokens=broken.delivered_tokens,
            )
        case "delta":
            delta = event.delta
            return Delta(
                first_index=delta.first_index,
                token_ids=tuple(delta.token_ids),
                text=delta.text,
                logprobs=tuple(_logprobs_from_proto(position) for position in delta.logprobs),
            )
        case "finished":
            return _finished_from_proto(event.finished)
        case "failed":
            return error_from_proto(event.failed)
        case _:
            raise errors.MalformedAnswer(
                "the coordinator sent a task event that this version of the SDK does not know; update the SDK"
            )


def envelope_to_proto(envelope: SignedEnvelope) -> envelope_pb2.SignedEnvelope:
    return envelope_pb2.SignedEnvelope(
        payload=envelope.payload,
        payload_type=envelope.payload_type,
        signatures=[
            envelope_pb2.Signature(key_id=signature.key_id, signature=signature.signature)
            for signature in envelope.signatures
        ],
    )


def task_from_proto(task: task_service_pb2.GetTaskResponse) -> Task:
    error = task.error if task.HasField("error") else None
    return Task(
        task_id=task.task_id,
        status=task.status,
        usage=_usage_from_proto(task.usage),
        attempts=tuple(
            AttemptRecord(
                attempt=record.attempt,
                node_id=record.node_id,
                first_index=record.first_index,
                delivered_tokens=record.delivered_tokens,
                outcome=record.outcome,
                signed=record.signed,
                energy_j=_joules(record),
                energy_method=record.energy_method,
                decision=_decision_from_proto(record.decision) if record.HasField("decision") else None,
                first_token_ms=record.first_token_ms if record.HasField("first_token_ms") else None,
            )
            for record in task.attempts
        ),
        error=None
        if error is None
        else TaskError(reason=_enum_name(error_pb2.ErrorReason, error.reason, "ERROR_REASON_"), message=error.message),
        waiting=Waiting(reason=task.waiting.reason, waited_ms=task.waiting.waited_ms)
        if task.HasField("waiting")
        else None,
    )


def _decision_from_proto(decision: task_service_pb2.Decision) -> Decision:
    return Decision(
        why=decision.why,
        engine_id=decision.engine_id,
        cost_micro=decision.cost_micro,
        first_token_ms=decision.first_token_ms,
        token_ms=decision.token_ms,
        tail=decision.tail,
    )


def _joules(record: task_service_pb2.AttemptRecord) -> float | None:
    # A figure whose method is none is no figure.
    known = record.HasField("energy_mj") and record.energy_method not in ("", "none")
    return record.energy_mj / 1000 if known else None


def model_from_proto(model: task_service_pb2.Model) -> Model:
    return Model(
        name=model.name,
        revision=model.revision,
        manifest_digest=model.manifest_digest,
        licence=model.licence,
        kind=_enum_name(completion_pb2.TaskKind, model.kind, "TASK_KIND_").lower(),
        context_tokens=model.context_tokens,
        engines_ready=model.engines_ready,
        created_at_ms=model.created_at_ms,
    )


def finish_reason_name(value: int) -> str:
    """Return "stop", "length", or "unspecified"."""
    return _enum_name(completion_pb2.FinishReason, value, "FINISH_REASON_").lower()


def _request(model: str, options: TaskOptions) -> task_service_pb2.SubmitTaskRequest:
    request = task_service_pb2.SubmitTaskRequest(kind=completion_pb2.TASK_KIND_GENERATE)
    _put(request, "model", model)
    unknown = options.keys() - TaskOptions.__annotations__.keys()
    if unknown:
        name = min(unknown)
        raise errors.InvalidArgument(f"there is no option {name!r}", param=name)
    for name, value in options.items():
        if value is None:
            continue
        if name == "stop":
            _extend(request.stop, [value] if isinstance(value, str) else value, name)
        elif name == "service_class":
            _put_enum(request, name, completion_pb2.ServiceClass, "SERVICE_CLASS_", value)
        elif name == "privacy_class":
            _put_enum(request, name, completion_pb2.PrivacyClass, "PRIVACY_CLASS_", value)
        elif name in ("max_tokens", "deadline_ms", "max_ttft_ms", "max_price_micro"):
            # 0 means "not said" on the wire, so that a caller's 0 would be obeyed as its opposite.
            if value == 0:
                raise errors.InvalidArgument(f"{name} must be at least 1", param=name)
            _put(request, name, value)
        else:
            _put(request.sampling, name, value)
    return request


def _finished_from_proto(finished: task_service_pb2.TaskFinished) -> Finished:
    reason = finish_reason_name(finished.finish_reason)
    if reason not in ("stop", "length"):
        raise errors.MalformedAnswer(f"the coordinator finished the task for the unknown reason {reason!r}")
    return Finished(
        finish_reason=cast(FinishReason, reason),
        usage=_usage_from_proto(finished.usage),
        header=_envelope_from_proto(finished.header) if finished.HasField("header") else None,
        statement=_envelope_from_proto(finished.statement) if finished.HasField("statement") else None,
        node_public_key=finished.node_public_key,
    )


def _envelope_from_proto(envelope: envelope_pb2.SignedEnvelope) -> SignedEnvelope:
    return SignedEnvelope(
        payload=envelope.payload,
        payload_type=envelope.payload_type,
        signatures=tuple(Signature(signature.key_id, signature.signature) for signature in envelope.signatures),
    )


def _usage_from_proto(usage: completion_pb2.Usage) -> Usage:
    return Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)


def _logprobs_from_proto(position: completion_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=_logprob_from_proto(position.chosen), top=tuple(_logprob_from_proto(top) for top in position.top)
    )


def _logprob_from_proto(logprob: completion_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank)


def _turns(messages: str | Sequence[Turn]) -> list[Message]:
    if isinstance(messages, str):
        return [Message("user", messages)]
    turns = []
    for index, turn in enumerate(messages):
        if isinstance(turn, Message):
            turns.append(turn)
        elif turn.keys() == {"role", "content"}:
            turns.append(Message(turn["role"], turn["content"]))
        else:
            name = f"messages[{index}]"
            raise errors.InvalidArgument(f"{name} must be a Message or have exactly role and content", param=name)
    return turns


def _put(target: Any, name: str, value: object, param: str | None = None) -> None:
    try:
        setattr(target, name, value)
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(f"{param or name} cannot be sent: {error}", param=param or name) from error


def _extend(target: Any, values: Any, param: str) -> None:
    try:
        target.extend(values)
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(f"{param} cannot be sent: {error}", param=param) from error


def _put_enum(target: Any, name: str, enum: Any, prefix: str, value: object) -> None:
    names = [
        known.removeprefix(prefix).lower()
        for known in enum.DESCRIPTOR.values_by_name
        if not known.endswith("_UNSPECIFIED")
    ]
    if value not in names:
        raise errors.InvalidArgument(f"{name} is {value!r}, expected one of {', '.join(names)}", param=name)
    setattr(target, name, enum.Value(f"{prefix}{value}".upper()))


def _enum_name(enum: Any, value: int, prefix: str) -> str:
    # An enum is open: a newer peer may send a number that has no name here.
    if value not in enum.values():
        return f"UNKNOWN_{value}"
    return cast(str, enum.Name(value)).removeprefix(prefix)
