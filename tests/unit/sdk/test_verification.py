"""Statement verification: one forged field at a time, and any flipped byte, is refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from slackwater._protos.slackwater.common.v1 import completion_pb2
from slackwater._protos.slackwater.task.v1 import task_service_pb2
from slackwater._task_messages import event_from_proto
from slackwater.errors import VerificationError
from slackwater.events import Accepted, AttemptStarted, Finished, SignedEnvelope
from slackwater.testing import Parts, ScriptedAnswer
from slackwater.verification import VerifiedStatement, verify_finished

SCRIPT = ScriptedAnswer(pieces=["a", "b", "c", "d"], seam=1, task_id="t")
COORDINATOR_KEY = SCRIPT.coordinator_key.public_key().public_bytes_raw()
OTHER_KEY = Ed25519PrivateKey.generate()


def converted(**event: Any) -> Any:
    return event_from_proto(task_service_pb2.TaskEvent(**event))


def accepted() -> Accepted:
    event = converted(accepted=SCRIPT.accepted())
    assert isinstance(event, Accepted)
    return event


def started(first_index: int = 1) -> AttemptStarted:
    return AttemptStarted(attempt=2, node_id="node-2", first_index=first_index)


def sealed(parts: Parts) -> Finished:
    event = converted(finished=parts.seal())
    assert isinstance(event, Finished)
    return event


def verify(finished: Finished, **overrides: Any) -> VerifiedStatement:
    arguments: dict[str, Any] = {
        "accepted": accepted(),
        "started": started(),
        "token_ids": SCRIPT.token_ids,
        "coordinator_public_keys": [COORDINATOR_KEY],
    }
    return verify_finished(finished, **{**arguments, **overrides})


def test_an_honest_statement_holds() -> None:
    verified = verify(sealed(SCRIPT.parts()))
    assert (verified.task_id, verified.node_id, verified.attempt, verified.first_index) == ("t", "node-2", 2, 1)
    assert verified.token_ids == tuple(SCRIPT.token_ids[1:])
    assert verified.finish_reason == "stop"
    assert verified.energy_method == "none"
    assert verified.header_signature_checked


def test_without_a_coordinator_key_the_result_says_that_the_header_was_not_checked() -> None:
    assert not verify(sealed(SCRIPT.parts()), coordinator_public_keys=()).header_signature_checked


def test_while_keys_rotate_any_of_the_coordinators_keys_serves() -> None:
    keys = [OTHER_KEY.public_key().public_bytes_raw(), COORDINATOR_KEY]
    assert verify(sealed(SCRIPT.parts()), coordinator_public_keys=keys).header_signature_checked


FORGERIES: dict[str, tuple[int, Callable[[Parts], Any]]] = {
    "header signed by another key": (2, lambda parts: setattr(parts, "coordinator_key", OTHER_KEY)),
    "header of another kind": (4, lambda parts: setattr(parts.header, "kind", completion_pb2.TASK_KIND_SCORE)),
    "hash of another header": (5, lambda parts: setattr(parts.statement, "header_sha256", bytes(32))),
    "node in the header": (6, lambda parts: setattr(parts.header, "node_id", "node-3")),
    "node in the statement": (6, lambda parts: setattr(parts.statement, "node_id", "node-3")),
    "task in the header": (6, lambda parts: setattr(parts.header, "task_id", "u")),
    "task in the statement": (6, lambda parts: setattr(parts.statement, "task_id", "u")),
    "attempt in the header": (6, lambda parts: setattr(parts.header, "attempt", 1)),
    "attempt in the statement": (6, lambda parts: setattr(parts.statement, "attempt", 1)),
    "first index in the header": (6, lambda parts: setattr(parts.header, "first_index", 0)),
    "first index in the statement": (6, lambda parts: setattr(parts.statement, "first_index", 2)),
    "model": (7, lambda parts: setattr(parts.header, "manifest_digest", "sha256:" + "00" * 32)),
    "seed": (7, lambda parts: setattr(parts.header.sampling, "seed", 12)),
    "prompt length": (7, lambda parts: setattr(parts.header, "prompt_token_count", 9)),
    "prompt length in usage": (7, lambda parts: setattr(parts.usage, "prompt_tokens", 8)),
    "an id changed": (8, lambda parts: setattr(parts.statement, "token_ids", b"\x01" + parts.statement.token_ids[1:])),
    "an id lost": (8, lambda parts: setattr(parts.statement, "token_ids", parts.statement.token_ids[:-4])),
    "an id added": (8, lambda parts: setattr(parts.statement, "token_ids", parts.statement.token_ids + bytes(4))),
    "a byte too many": (8, lambda parts: setattr(parts.statement, "token_ids", parts.statement.token_ids + bytes(1))),
    "count of ids": (9, lambda parts: setattr(parts.statement, "completion_tokens", 4)),
    "count of prompt ids": (9, lambda parts: setattr(parts.statement, "prompt_tokens", 7)),
    "usage": (9, lambda parts: setattr(parts.usage, "completion_tokens", 5)),
    "more ids than allowed": (9, lambda parts: setattr(parts.header, "max_tokens", 2)),
    "a stop id in the middle": (9, lambda parts: parts.header.stop_token_ids.append(1002)),
    "stopped without a stop id": (9, lambda parts: parts.header.ClearField("stop_token_ids")),
    "length without reaching it": (
        9,
        lambda parts: setattr(parts.statement, "finish_reason", completion_pb2.FINISH_REASON_LENGTH),
    ),
    "finish reason of the coordinator": (
        9,
        lambda parts: setattr(parts, "finish_reason", completion_pb2.FINISH_REASON_LENGTH),
    ),
    "no finish reason in the statement": (
        9,
        lambda parts: setattr(parts.statement, "finish_reason", completion_pb2.FINISH_REASON_UNSPECIFIED),
    ),
}


# Each row forges one field of the statement, and names the step that must refuse it.
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_field_is_refused_at_its_step(name: str) -> None:
    step, forge = FORGERIES[name]
    parts = SCRIPT.parts()
    forge(parts)
    with pytest.raises(VerificationError) as caught:
        verify(sealed(parts))
    assert caught.value.step == step
    assert caught.value.why in str(caught.value)


@pytest.mark.parametrize("absent", [{"header": None}, {"statement": None}, {"node_public_key": b""}])
def test_an_absent_part_is_refused(absent: dict[str, Any]) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(dataclasses.replace(sealed(SCRIPT.parts()), **absent))
    assert caught.value.step == 1


def test_a_statement_signed_by_another_node_is_refused() -> None:
    key = OTHER_KEY.public_key().public_bytes_raw()
    with pytest.raises(VerificationError) as caught:
        verify(dataclasses.replace(sealed(SCRIPT.parts()), node_public_key=key))
    assert caught.value.step == 3


def test_a_header_does_not_pass_as_a_statement() -> None:
    finished = sealed(SCRIPT.parts())
    with pytest.raises(VerificationError) as caught:
        verify(dataclasses.replace(finished, statement=finished.header))
    assert caught.value.step == 3


def test_without_a_coordinator_key_the_headers_type_still_counts() -> None:
    finished = sealed(SCRIPT.parts())
    assert finished.header is not None
    header = dataclasses.replace(finished.header, payload_type="text/plain")
    with pytest.raises(VerificationError) as caught:
        verify(dataclasses.replace(finished, header=header), coordinator_public_keys=())
    assert caught.value.step == 4


@pytest.mark.parametrize("change", [lambda ids: ids[:-1], lambda ids: [*ids, 5], lambda ids: [*ids[:-1], ids[-1] + 1]])
def test_ids_that_this_client_did_not_receive_are_refused(change: Callable[[list[int]], list[int]]) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(sealed(SCRIPT.parts()), token_ids=change(SCRIPT.token_ids))
    assert caught.value.step == 8


def test_a_client_that_attached_late_can_check_an_attempt_that_began_later() -> None:
    ids = SCRIPT.token_ids[1:]
    assert verify(sealed(SCRIPT.parts()), token_ids=ids, first_token_index=1).token_ids == tuple(ids)
    with pytest.raises(VerificationError) as caught:
        verify(sealed(SCRIPT.parts()), token_ids=SCRIPT.token_ids[2:], first_token_index=2)
    assert (caught.value.step, "attach from 1" in caught.value.why) == (8, True)


def test_only_with_stop_strings_may_a_stop_coincide_with_the_nodes_limit() -> None:
    parts = SCRIPT.parts()
    parts.header.max_tokens = 3
    parts.header.ClearField("stop_token_ids")
    parts.statement.finish_reason = completion_pb2.FINISH_REASON_LENGTH
    finished = sealed(parts)
    assert verify(finished, stop_strings=True).finish_reason == "length"
    with pytest.raises(VerificationError) as caught:
        verify(finished)
    assert caught.value.step == 9


def flip(data: bytes, position: int, mask: int) -> bytes:
    changed = bytearray(data)
    changed[position % len(data)] ^= mask
    return bytes(changed)


def flipped(finished: Finished, part: str, position: int, mask: int) -> Finished:
    if part == "node_public_key":
        return dataclasses.replace(finished, node_public_key=flip(finished.node_public_key, position, mask))
    name, field = part.split(".")
    envelope = getattr(finished, name)
    assert isinstance(envelope, SignedEnvelope)
    if field == "payload":
        changed = dataclasses.replace(envelope, payload=flip(envelope.payload, position, mask))
    elif field == "type":
        changed = dataclasses.replace(
            envelope, payload_type=flip(envelope.payload_type.encode(), position, mask & 0x7F or 1).decode()
        )
    else:
        signature = envelope.signatures[0]
        signature = dataclasses.replace(signature, signature=flip(signature.signature, position, mask))
        changed = dataclasses.replace(envelope, signatures=(signature,))
    change: dict[str, Any] = {name: changed}
    return dataclasses.replace(finished, **change)


PARTS = ["header.payload", "header.signature", "header.type", "statement.payload", "statement.signature"]


# Mutation tried: step 2 left out, and step 5 left out.
@given(
    part=st.sampled_from([*PARTS, "statement.type", "node_public_key"]),
    position=st.integers(0, 1000),
    mask=st.integers(1, 255),
)
def test_any_flipped_byte_is_refused(part: str, position: int, mask: int) -> None:
    finished = sealed(SCRIPT.parts())
    with pytest.raises(VerificationError):
        verify(flipped(finished, part, position, mask))


@given(payload=st.binary(max_size=64))
def test_garbage_that_is_well_signed_is_refused(payload: bytes) -> None:
    finished = sealed(SCRIPT.parts())
    assert finished.header is not None
    garbage = dataclasses.replace(finished.header, payload=payload)
    with pytest.raises(VerificationError):
        verify(dataclasses.replace(finished, header=garbage), coordinator_public_keys=())
