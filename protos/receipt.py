"""Checking a receipt: this entry stands in the log that the coordinator has signed.

It shows that the coordinator has committed itself to the entry, in this
place. That everybody is shown one and the same log follows only from
comparing checkpoints (protos/checkpoint.py: verify_growth): of one's own over
time, and with those of others.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from protos.checkpoint import Checkpoint, CheckpointInvalid, open_checkpoint
from protos.merkle import ProofInvalid, leaf_hash, verify_inclusion
from protos.slackwater.common.v1 import receipt_pb2

# An entry names accounts, amounts and hashes, never text: a few hundred bytes.
ENTRY_BYTES_MAX = 64 * 1024


class ReceiptInvalid(Exception):
    """The receipt proves nothing; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenEntry:
    """An entry's exact bytes, its place in the log, and the signed checkpoint that covers it."""

    entry: bytes
    index: int
    checkpoint: Checkpoint


def open_receipt(receipt: receipt_pb2.Receipt, coordinator_public_keys: Iterable[bytes]) -> ProvenEntry:
    """Return the entry of a receipt, after signature and proof held.

    Args:
        coordinator_public_keys: raw Ed25519 keys that may sign checkpoints, had from elsewhere than the receipt.

    Raises:
        ReceiptInvalid: the checkpoint is not signed by a trusted key, or does not cover the entry.
    """
    if len(receipt.entry) > ENTRY_BYTES_MAX:
        raise ReceiptInvalid(f"an entry of {len(receipt.entry)} bytes; none has more than {ENTRY_BYTES_MAX}")
    try:
        checkpoint = open_checkpoint(receipt.checkpoint, coordinator_public_keys)
        verify_inclusion(
            leaf_hash(receipt.entry), receipt.index, checkpoint.size, receipt.inclusion_proof, checkpoint.root
        )
    except (CheckpointInvalid, ProofInvalid) as error:
        raise ReceiptInvalid(str(error)) from error
    return ProvenEntry(entry=receipt.entry, index=receipt.index, checkpoint=checkpoint)
