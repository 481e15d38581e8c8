"""What a node signs when an attempt ended by itself.

The statement binds the result to the exact header bytes, so that nobody can
move it to another task, node or attempt. Energy is what `agent.energy.meter`
attributes to the attempt, with the method by which it is known.
"""

import hashlib
import struct
from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.energy.card import EnergyMethod
from agent.events import SignStatement
from inference.task import FinishReason, TaskKind, pack_token_ids, scores_bytes
from protos import signing
from protos.slackwater.common.v1 import completion_pb2, envelope_pb2, statement_pb2

# The epoch of a node's first signing key, as listed at enrolment.
KEY_EPOCH = 1

_FINISH_REASONS = {
    None: completion_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: completion_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: completion_pb2.FINISH_REASON_LENGTH,
}

_ENERGY_METHODS = {
    EnergyMethod.NONE: statement_pb2.ENERGY_METHOD_NONE,
    EnergyMethod.COUNTER: statement_pb2.ENERGY_METHOD_COUNTER,
    EnergyMethod.INTEGRATED_POWER: statement_pb2.ENERGY_METHOD_INTEGRATED_POWER,
    EnergyMethod.ESTIMATE: statement_pb2.ENERGY_METHOD_ESTIMATE,
}


def sign_statement(command: SignStatement, node_id: str, key: Ed25519PrivateKey) -> envelope_pb2.SignedEnvelope:
    """Return the signed statement about one attempt."""
    order = command.order
    statement = statement_pb2.ResultStatement(
        header_sha256=order.header_sha256,
        node_id=node_id,
        task_id=order.key.task_id,
        attempt=order.key.attempt,
        first_index=order.first_index,
        token_ids=pack_token_ids(command.output_ids),
        finish_reason=_FINISH_REASONS[command.finish_reason],
        prompt_tokens=order.prompt_token_count,
        completion_tokens=len(command.output_ids),
        first_token_ms=command.first_token_ms,
        total_ms=command.total_ms,
        energy_mj=command.energy.energy_mj,
        energy_method=_ENERGY_METHODS[command.energy.method],
        engine=command.engine,
        engine_version=command.engine_version,
        key_epoch=KEY_EPOCH,
        output_sha256=_output_sha256(command),
    )
    return signing.seal(signing.RESULT_TYPE, statement.SerializeToString(), key)


def pack_floats(values: Sequence[float]) -> bytes:
    """Return numbers as they are hashed and sent: little-endian float32."""
    return struct.pack(f"<{len(values)}f", *values)


def _output_sha256(command: SignStatement) -> bytes:
    match command.order.kind:
        case TaskKind.GENERATE:
            return b""
        case TaskKind.EMBED:
            return hashlib.sha256(pack_floats(command.embedding)).digest()
        case TaskKind.SCORE:
            return hashlib.sha256(scores_bytes(command.scores)).digest()
