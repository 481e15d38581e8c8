"""Receipts and checkpoints at the client: one forged field at a time is refused, with nothing but a public key."""

import dataclasses
from collections.abc import Callable

import pytest
import slackwater
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from slackwater import Checkpoint, Receipt, VerificationError, verify_growth, verify_receipt
from slackwater._protos.checkpoint import log_origin, sign_checkpoint
from slackwater._protos.merkle import Frontier, extend, leaf_hash, node_hash

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = [KEY.public_key().public_bytes_raw()]
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
ENTRIES = [b"entry 0", b"entry 1", b"entry 2"]
LEAVES = [leaf_hash(entry) for entry in ENTRIES]


def checkpoint(entries: list[bytes]) -> Checkpoint:
    frontier = extend(Frontier(), entries).frontier
    return Checkpoint(origin=log_origin("cluster-1"), size=frontier.size, root=frontier.root())


NOTE = sign_checkpoint(checkpoint(ENTRIES), KEY)
# A log of three: the second entry's siblings are the first, and the third.
RECEIPT = Receipt(entry=ENTRIES[1], index=1, inclusion_proof=(LEAVES[0], LEAVES[2]), checkpoint=NOTE)
# From two entries, which are one subtree, to three.
PROOF = [LEAVES[2]]


def test_an_honest_receipt_holds() -> None:
    verified = verify_receipt(RECEIPT, coordinator_public_keys=KEYS)
    assert (verified.entry, verified.index) == (b"entry 1", 1)
    assert verified.checkpoint == Checkpoint(
        origin="slackwater-ledger/cluster-1", size=3, root=node_hash(node_hash(*LEAVES[:2]), LEAVES[2])
    )


FORGED: dict[str, Callable[[Receipt], Receipt]] = {
    "entry_fail": lambda receipt: dataclasses.replace(receipt, entry=b"entry 9"),
    "entry-empty_fail": lambda receipt: dataclasses.replace(receipt, entry=b""),
    "index_fail": lambda receipt: dataclasses.replace(receipt, index=0),
    "index-outside_fail": lambda receipt: dataclasses.replace(receipt, index=3),
    "index-negative_fail": lambda receipt: dataclasses.replace(receipt, index=-1),
    "index-of-another-size_fail": lambda receipt: dataclasses.replace(receipt, index=1 << 64),
    "proof-empty_fail": lambda receipt: dataclasses.replace(receipt, inclusion_proof=()),
    "proof-zeros_fail": lambda receipt: dataclasses.replace(receipt, inclusion_proof=(bytes(32), bytes(32))),
    "proof-swapped_fail": lambda receipt: dataclasses.replace(receipt, inclusion_proof=receipt.inclusion_proof[::-1]),
    "proof-dropped_fail": lambda receipt: dataclasses.replace(receipt, inclusion_proof=receipt.inclusion_proof[:1]),
    "proof-extended_fail": lambda receipt: dataclasses.replace(
        receipt, inclusion_proof=(*receipt.inclusion_proof, bytes(32))
    ),
    "checkpoint-empty_fail": lambda receipt: dataclasses.replace(receipt, checkpoint=b""),
    "checkpoint-wrong-root_fail": lambda receipt: dataclasses.replace(
        receipt, checkpoint=sign_checkpoint(dataclasses.replace(checkpoint(ENTRIES), root=bytes(32)), KEY)
    ),
    "checkpoint-of-a-shorter-log_fail": lambda receipt: dataclasses.replace(
        receipt, checkpoint=sign_checkpoint(checkpoint(ENTRIES[:1]), KEY)
    ),
    "checkpoint-key_fail": lambda receipt: dataclasses.replace(
        receipt, checkpoint=sign_checkpoint(checkpoint(ENTRIES), OTHER_KEY)
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_each_forged_field_is_refused(name: str) -> None:
    # Mutation: verify_inclusion skipped in open_receipt, all but those of the checkpoint's key and form pass.
    with pytest.raises(VerificationError) as caught:
        verify_receipt(FORGED[name](RECEIPT), coordinator_public_keys=KEYS)
    assert caught.value.step == 1


@given(st.data())
def test_any_flipped_bit_of_a_receipt_in_a_file_is_refused(data: st.DataObject) -> None:
    raw = bytearray(RECEIPT.to_bytes())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises((VerificationError, slackwater.CallerError)):
        verify_receipt(Receipt.from_bytes(bytes(raw)), coordinator_public_keys=KEYS)


def test_a_receipt_survives_a_file_and_garbage_is_none() -> None:
    assert Receipt.from_bytes(RECEIPT.to_bytes()) == RECEIPT
    with pytest.raises(slackwater.CallerError):
        Receipt.from_bytes(b"\xff")


@pytest.mark.parametrize("keys", [[], [OTHER_KEY.public_key().public_bytes_raw()], [b"short"]])
def test_without_the_coordinators_key_nothing_holds(keys: list[bytes]) -> None:
    with pytest.raises(VerificationError):
        verify_receipt(RECEIPT, coordinator_public_keys=keys)
    with pytest.raises(VerificationError):
        verify_growth(None, NOTE, [], coordinator_public_keys=keys)


def test_a_log_that_grew_is_accepted() -> None:
    seen = verify_growth(None, sign_checkpoint(checkpoint(ENTRIES[:2]), KEY), [], coordinator_public_keys=KEYS)
    assert verify_growth(seen, NOTE, PROOF, coordinator_public_keys=KEYS) == checkpoint(ENTRIES)


@pytest.mark.parametrize(
    ("seen", "proof"),
    [
        pytest.param(checkpoint([b"another past", ENTRIES[1]]), PROOF, id="root-fork_fail"),
        pytest.param(checkpoint([*ENTRIES, b"entry 3"]), [], id="size-rolled-back_fail"),
        pytest.param(checkpoint([*ENTRIES[:2], b"another end"]), [], id="root-at-same-size_fail"),
        pytest.param(dataclasses.replace(checkpoint(ENTRIES[:2]), origin=log_origin("x")), PROOF, id="origin_fail"),
        pytest.param(checkpoint(ENTRIES[:2]), [], id="proof-empty_fail"),
        pytest.param(checkpoint(ENTRIES[:2]), [*PROOF, bytes(32)], id="proof-extended_fail"),
    ],
)
def test_a_log_that_was_rewritten_is_refused(seen: Checkpoint, proof: list[bytes]) -> None:
    with pytest.raises(VerificationError) as caught:
        verify_growth(seen, NOTE, proof, coordinator_public_keys=KEYS)
    assert caught.value.step == 2
