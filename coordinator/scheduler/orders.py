"""What an order to a node says: all that was decided about an attempt, and nothing of its prompt but a hash."""

import secrets

from coordinator.api.asks import ask_to_wire
from coordinator.api.completion import KIND_TO_WIRE, PRIVACY_CLASS_TO_WIRE, SERVICE_CLASS_TO_WIRE
from coordinator.scheduler import commands as c
from inference.task import prompt_sha256
from protos.slackwater.common.v1 import completion_pb2, statement_pb2

# How long a signed header may wait in queues before an agent must refuse it;
# a coordinator or agent that was stopped for 10 s must not void it.
HEADER_LIFETIME_MS = 60_000


def task_header(
    command: c.Assign, cluster_id: str, packed_ids: bytes, cache_salt: bytes, now_ms: int
) -> statement_pb2.TaskHeader:
    """Return the header of an attempt, with a nonce and a salt that nobody can foresee.

    Args:
        packed_ids: the prompt's ids as they will travel.
        cache_salt: see `CacheSalts`.
    """
    spec, salt = command.spec, secrets.token_bytes(16)
    sampling = spec.sampling
    return statement_pb2.TaskHeader(
        cluster_id=cluster_id,
        node_id=command.node_id,
        task_id=spec.task_id,
        attempt=command.attempt,
        lease_epoch=command.lease_epoch,
        issued_at_ms=now_ms,
        not_after_ms=now_ms + HEADER_LIFETIME_MS,
        nonce=secrets.token_bytes(16),
        manifest_digest=spec.manifest_digest,
        kind=KIND_TO_WIRE[spec.kind],
        sampling=completion_pb2.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logprobs=sampling.logprobs,
        ),
        max_tokens=command.max_tokens,
        stop_token_ids=spec.stop_token_ids,
        prompt_token_count=len(command.prompt_ids),
        prompt_salt=salt,
        prompt_sha256=prompt_sha256(salt, packed_ids),
        first_index=command.first_index,
        service_class=SERVICE_CLASS_TO_WIRE[spec.service_class],
        privacy_class=PRIVACY_CLASS_TO_WIRE[spec.privacy_class],
        ask=None if command.ask is None else ask_to_wire(command.ask),
        cache_salt=cache_salt,
    )
