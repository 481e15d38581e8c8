"""A receipt holds only as a whole."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.merkle import prove_inclusion
from coordinator.ledger.testing import filled_store
from protos.checkpoint import Checkpoint, log_origin, sign_checkpoint
from protos.receipt import ENTRY_BYTES_MAX, ReceiptInvalid, open_receipt
from protos.slackwater.common.v1.receipt_pb2 import Receipt

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
ENTRIES = [b"entry %d" % number for number in range(13)]


def receipt_for(index: int, entries: list[bytes] = ENTRIES, key: Ed25519PrivateKey = KEY) -> Receipt:
    store, frontier = filled_store(entries)
    checkpoint = Checkpoint(origin=log_origin("cluster-1"), size=frontier.size, root=frontier.root())
    return Receipt(
        entry=entries[index],
        index=index,
        inclusion_proof=prove_inclusion(store, index, frontier.size),
        checkpoint=sign_checkpoint(checkpoint, key),
    )


@pytest.mark.parametrize("index", range(len(ENTRIES)))
def test_the_receipt_of_every_entry_holds(index: int) -> None:
    proven = open_receipt(receipt_for(index), [PUBLIC])
    assert (proven.entry, proven.index) == (ENTRIES[index], index)
    assert (proven.checkpoint.origin, proven.checkpoint.size) == ("slackwater-ledger/cluster-1", 13)


@given(st.integers(0, len(ENTRIES) - 1), st.data())
def test_any_flipped_bit_of_any_field_is_refused(index: int, data: st.DataObject) -> None:
    # Mutation: verify_inclusion left out, a flipped entry passes.
    receipt = receipt_for(index)
    fields = [receipt.entry, receipt.checkpoint, *receipt.inclusion_proof]
    field = data.draw(st.integers(0, len(fields) - 1))
    bit = data.draw(st.integers(0, 8 * len(fields[field]) - 1))
    changed = bytearray(fields[field])
    changed[bit // 8] ^= 1 << bit % 8
    fields[field] = bytes(changed)
    forged = Receipt(entry=fields[0], index=index, checkpoint=fields[1], inclusion_proof=fields[2:])
    with pytest.raises(ReceiptInvalid):
        open_receipt(forged, [PUBLIC])


@given(st.integers(0, len(ENTRIES) - 1), st.integers(0, (1 << 64) - 1))
def test_any_other_index_is_refused(index: int, other: int) -> None:
    receipt = receipt_for(index)
    receipt.index = other
    if other == index:
        assert open_receipt(receipt, [PUBLIC]).index == index
        return
    with pytest.raises(ReceiptInvalid):
        open_receipt(receipt, [PUBLIC])


def test_parts_of_two_receipts_make_none() -> None:
    first, second, longer = receipt_for(2), receipt_for(3), receipt_for(2, [*ENTRIES, b"one more"])
    for forged in (
        Receipt(entry=second.entry, index=2, inclusion_proof=first.inclusion_proof, checkpoint=first.checkpoint),
        Receipt(entry=first.entry, index=2, inclusion_proof=second.inclusion_proof, checkpoint=first.checkpoint),
        Receipt(entry=first.entry, index=2, inclusion_proof=first.inclusion_proof, checkpoint=longer.checkpoint),
        Receipt(entry=first.entry, index=2, checkpoint=first.checkpoint),
        Receipt(entry=first.entry, index=2, inclusion_proof=first.inclusion_proof),
        Receipt(),
    ):
        with pytest.raises(ReceiptInvalid):
            open_receipt(forged, [PUBLIC])


def test_a_receipt_of_another_key_or_of_a_monstrous_entry_is_refused() -> None:
    with pytest.raises(ReceiptInvalid, match="not trusted"):
        open_receipt(receipt_for(0, key=Ed25519PrivateKey.generate()), [PUBLIC])
    with pytest.raises(ReceiptInvalid, match="none has more"):
        open_receipt(receipt_for(0, [bytes(ENTRY_BYTES_MAX + 1)]), [PUBLIC])
