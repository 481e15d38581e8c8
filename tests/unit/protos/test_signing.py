"""Signed envelopes: what is signed, and that nothing else passes."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from protos import signing
from protos.signing import SignatureInvalid
from protos.slackwater.common.v1.envelope_pb2 import Signature, SignedEnvelope

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
OTHER_PUBLIC = OTHER.public_key().public_bytes_raw()


def opened(envelope: SignedEnvelope, *keys: bytes) -> bytes:
    return signing.open_envelope(envelope, signing.TASK_TYPE, keys or (PUBLIC,))


def test_the_signed_bytes_are_those_of_the_dsse_specification() -> None:
    """The example of the DSSE v1.0.2 protocol document, and the shortest case.

    Mutation seen to fail here: the length of the type counted in characters of the payload.
    """
    assert signing.pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )
    assert signing.pae("", b"") == b"DSSEv1 0  0 "
    assert signing.pae("ä", b"\x00 ") == b"DSSEv1 2 \xc3\xa4 2 \x00 "


def test_an_envelope_is_reproducible_to_the_byte() -> None:
    """Ed25519 draws nothing, so that this signature can be checked against any other implementation."""
    envelope = signing.seal(signing.TASK_TYPE, b"payload", KEY)
    assert envelope.payload == b"payload"
    assert envelope.payload_type == "application/vnd.slackwater.task.v1+protobuf"
    (signature,) = envelope.signatures
    assert signature.key_id == "56475aa75463474c"
    assert signature.signature == KEY.sign(b"DSSEv1 43 application/vnd.slackwater.task.v1+protobuf 7 payload")


@given(st.binary(max_size=300))
def test_any_payload_comes_back_as_it_was(payload: bytes) -> None:
    assert opened(signing.seal(signing.TASK_TYPE, payload, KEY)) == payload


@given(st.binary(min_size=1, max_size=60), st.data())
def test_no_byte_of_an_envelope_changes_unseen(payload: bytes, data: st.DataObject) -> None:
    """Mutation seen to fail here: no check of the key id."""
    envelope = signing.seal(signing.TASK_TYPE, payload, KEY)
    (signature,) = envelope.signatures
    parts = {
        "payload": envelope.payload,
        "payload_type": envelope.payload_type.encode(),
        "key_id": signature.key_id.encode(),
        "signature": signature.signature,
    }
    name = data.draw(st.sampled_from(sorted(parts)))
    part = bytearray(parts[name])
    position = data.draw(st.integers(0, len(part) - 1))
    # A string field holds valid UTF-8, whatever a sender does: protobuf refuses the rest before us.
    bit = data.draw(st.integers(0, 7 if name in ("payload", "signature") else 6))
    part[position] ^= 1 << bit
    parts[name] = bytes(part)
    changed = SignedEnvelope(
        payload=parts["payload"],
        payload_type=parts["payload_type"].decode(),
        signatures=[Signature(key_id=parts["key_id"].decode(), signature=parts["signature"])],
    )
    with pytest.raises(SignatureInvalid):
        opened(changed)


def test_a_signed_task_does_not_pass_as_a_signed_result() -> None:
    """Mutations seen to fail here: the type left out of pae; compared with nothing, and verified as it came."""
    task = signing.seal(signing.TASK_TYPE, b"payload", KEY)
    with pytest.raises(SignatureInvalid, match="payload type"):
        signing.open_envelope(task, signing.RESULT_TYPE, [PUBLIC])
    relabelled = SignedEnvelope(payload=task.payload, payload_type=signing.RESULT_TYPE, signatures=task.signatures)
    with pytest.raises(SignatureInvalid, match="no signature holds"):
        signing.open_envelope(relabelled, signing.RESULT_TYPE, [PUBLIC])


def test_an_envelope_opens_under_any_one_of_the_trusted_keys_and_under_no_other() -> None:
    envelope = signing.seal(signing.TASK_TYPE, b"payload", KEY)
    assert opened(envelope, OTHER_PUBLIC, PUBLIC) == b"payload"
    with pytest.raises(SignatureInvalid):
        opened(envelope, OTHER_PUBLIC)
    with pytest.raises(SignatureInvalid):
        signing.open_envelope(envelope, signing.TASK_TYPE, [])


def test_of_two_signatures_one_that_holds_is_enough() -> None:
    """While keys rotate. Mutation seen to fail here: raise at the first signature that does not hold."""
    envelope = signing.seal(signing.TASK_TYPE, b"payload", KEY)
    forged = Signature(key_id=signing.key_id(PUBLIC), signature=bytes(64))
    both = SignedEnvelope(
        payload=envelope.payload, payload_type=envelope.payload_type, signatures=[forged, *envelope.signatures]
    )
    assert opened(both) == b"payload"


@pytest.mark.parametrize("count", [0, signing.SIGNATURES_MAX + 1])
def test_an_envelope_has_one_to_four_signatures(count: int) -> None:
    """Mutation seen to fail here: no upper limit."""
    envelope = signing.seal(signing.TASK_TYPE, b"payload", KEY)
    signatures = [*envelope.signatures] * count
    changed = SignedEnvelope(payload=b"payload", payload_type=signing.TASK_TYPE, signatures=signatures)
    with pytest.raises(SignatureInvalid, match="signatures, expected 1 to 4"):
        opened(changed)


def test_a_payload_beyond_the_limit_is_not_even_hashed() -> None:
    """Mutation seen to fail here: >= in place of >, and no limit at all."""
    largest = signing.seal(signing.TASK_TYPE, bytes(signing.PAYLOAD_BYTES_MAX), KEY)
    assert len(opened(largest)) == signing.PAYLOAD_BYTES_MAX
    oversize = signing.seal(signing.TASK_TYPE, bytes(signing.PAYLOAD_BYTES_MAX + 1), KEY)
    with pytest.raises(SignatureInvalid, match="bytes, at most"):
        opened(oversize)


@pytest.mark.parametrize("signature", [b"", bytes(63), bytes(64), bytes(65)])
def test_a_signature_of_another_length_is_no_signature(signature: bytes) -> None:
    changed = SignedEnvelope(
        payload=b"payload",
        payload_type=signing.TASK_TYPE,
        signatures=[Signature(key_id=signing.key_id(PUBLIC), signature=signature)],
    )
    with pytest.raises(SignatureInvalid):
        opened(changed)


def test_proofs_of_different_facts_share_no_bytes() -> None:
    """Moving a byte from one part to the next is another proof.

    Mutation seen to fail here: join the parts themselves in place of their hashes.
    """
    base = ("token", b"request", b"pin", b"nonce")
    proofs = {
        signing.enrolment_proof(*base),
        signing.enrolment_proof("tokenr", b"equest", b"pin", b"nonce"),
        signing.enrolment_proof("token", b"requestp", b"in", b"nonce"),
        signing.enrolment_proof("token", b"request", b"pinn", b"once"),
        signing.renewal_proof(*base),
    }
    assert len(proofs) == 5
    assert {len(proof) for proof in proofs} == {5 * 32}
