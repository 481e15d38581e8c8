"""What a node signs."""

import hashlib
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent import events as e
from agent.assignments import Audience, EngineOffer, NonceCache, TaskOrder, check_assignment
from agent.energy.card import EnergyMethod
from agent.energy.meter import TaskEnergy
from agent.owner.asks import NOTHING_ASKED
from agent.owner.consent import Consent, ConsentSettings
from agent.statements import sign_statement
from agent.testing import CLUSTER_ID, MODEL, NODE_ID, make_header, seal_header
from inference.task import FinishReason, PositionLogprobs, TokenLogprob, pack_token_ids
from protos import signing
from protos.slackwater.common.v1 import completion_pb2, statement_pb2

COORDINATOR = Ed25519PrivateKey.generate()
NODE = Ed25519PrivateKey.generate()
PUBLIC = NODE.public_key().public_bytes_raw()


def order(**changes: object) -> tuple[TaskOrder, bytes]:
    envelope = seal_header(make_header(**changes), COORDINATOR)  # type: ignore[arg-type]
    checked, _ = check_assignment(
        envelope,
        1,
        audience=Audience(CLUSTER_ID, NODE_ID, (COORDINATOR.public_key().public_bytes_raw(),)),
        now_ms=1_000_000_000,
        nonces=NonceCache(),
        offers=[EngineOffer("main", MODEL, ready=True, free_slots=1)],
        consent=Consent(ConsentSettings()),
        asks=NOTHING_ASKED,
        tokens_today=0,
        local_time=None,
        draining=False,
    )
    return checked, envelope.payload


def signed(command: e.SignStatement) -> statement_pb2.ResultStatement:
    envelope = sign_statement(command, NODE_ID, NODE)
    return statement_pb2.ResultStatement.FromString(signing.open_envelope(envelope, signing.RESULT_TYPE, [PUBLIC]))


def test_a_statement_binds_the_result_to_the_exact_header() -> None:
    checked, payload = order(first_index=1)
    statement = signed(
        e.SignStatement(
            order=checked,
            engine="fake",
            engine_version="1.0",
            output_ids=[11, 2],
            finish_reason=FinishReason.STOP,
            first_token_ms=20,
            total_ms=50,
            energy=TaskEnergy(1234, EnergyMethod.COUNTER),
        )
    )
    assert statement == statement_pb2.ResultStatement(
        header_sha256=hashlib.sha256(payload).digest(),
        node_id=NODE_ID,
        task_id="task-1",
        attempt=1,
        first_index=1,
        token_ids=pack_token_ids([11, 2]),
        finish_reason=completion_pb2.FINISH_REASON_STOP,
        prompt_tokens=3,
        completion_tokens=2,
        first_token_ms=20,
        total_ms=50,
        energy_mj=1234,
        energy_method=statement_pb2.ENERGY_METHOD_COUNTER,
        engine="fake",
        engine_version="1.0",
        key_epoch=1,
    )


def test_scores_are_bound_by_their_hash() -> None:
    checked, _ = order(kind=completion_pb2.TASK_KIND_SCORE, max_tokens=0)
    scores = tuple(PositionLogprobs(TokenLogprob(token_id, -token_id / 4, 1)) for token_id in (2, 3))
    statement = signed(
        e.SignStatement(order=checked, engine="", engine_version="", first_token_ms=1, total_ms=1, scores=scores)
    )
    records = struct.pack("<IfIf", 2, -0.5, 3, -0.75)
    assert statement.output_sha256 == hashlib.sha256(records).digest()
    assert statement.finish_reason == completion_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize("method", EnergyMethod)
def test_every_energy_method_has_its_name_on_the_wire(method: EnergyMethod) -> None:
    checked, _ = order()
    energy = TaskEnergy(0, method)
    statement = signed(
        e.SignStatement(order=checked, engine="", engine_version="", first_token_ms=1, total_ms=1, energy=energy)
    )
    # Mutation: swapping two rows of the table fails this.
    assert statement_pb2.EnergyMethod.Name(statement.energy_method) == f"ENERGY_METHOD_{method.name}"
