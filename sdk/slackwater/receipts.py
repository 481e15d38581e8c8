"""Checking the coordinator's ledger without trusting the coordinator.

The coordinator hashes every entry of its ledger into one append-only log and
signs checkpoints of it. A receipt is an entry with the proof that it stands
in that log. Whoever keeps the last checkpoint seen, and checks that each
later one extends it, notices an entry that was changed or taken back; whoever
compares checkpoints with others notices a log that is shown to one and not to
another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from slackwater._protos import checkpoint as signed_notes
from slackwater._protos.checkpoint import Checkpoint, CheckpointInvalid, LogRewritten, open_checkpoint
from slackwater._protos.receipt import ReceiptInvalid, open_receipt
from slackwater._protos.slackwater.common.v1 import receipt_pb2
from slackwater.errors import InvalidArgument, VerificationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """An entry of the ledger as the coordinator hands it out; nothing of it is checked yet."""

    # The entry's bytes exactly as they were hashed.
    entry: bytes
    # Its sequence number, from 0.
    index: int
    # 32 bytes each.
    inclusion_proof: tuple[bytes, ...]
    # A signed note.
    checkpoint: bytes

    def to_bytes(self) -> bytes:
        """Return the receipt as one may keep it in a file."""
        return receipt_to_proto(self).SerializeToString()

    @staticmethod
    def from_bytes(data: bytes) -> "Receipt":
        """Read what `to_bytes` wrote.

        Raises:
            InvalidArgument: the bytes are no receipt.
        """
        try:
            return receipt_from_proto(receipt_pb2.Receipt.FromString(data))
        except DecodeError as error:
            raise InvalidArgument("the bytes are no receipt", param="data") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedEntry:
    """An entry that the coordinator has committed itself to, in this place of this log."""

    entry: bytes
    index: int
    checkpoint: Checkpoint


def receipt_from_proto(message: receipt_pb2.Receipt) -> Receipt:
    return Receipt(
        entry=message.entry,
        index=message.index,
        inclusion_proof=tuple(message.inclusion_proof),
        checkpoint=message.checkpoint,
    )


def receipt_to_proto(receipt: Receipt) -> receipt_pb2.Receipt:
    return receipt_pb2.Receipt(
        entry=receipt.entry,
        index=receipt.index,
        inclusion_proof=receipt.inclusion_proof,
        checkpoint=receipt.checkpoint,
    )


def verify_receipt(receipt: Receipt, *, coordinator_public_keys: Iterable[bytes]) -> VerifiedEntry:
    """Check that the entry of a receipt stands in a log that the coordinator has signed.

    1. The checkpoint is signed by one of `coordinator_public_keys`, and the
       inclusion proof leads from the entry's bytes and index to its root.

    What it does not prove: that the entry is right, only that it cannot be
    denied later; that others are shown the same log (compare checkpoints, and
    see `verify_growth`).

    Args:
        coordinator_public_keys: raw Ed25519 keys, for example those of `Accepted`, or better had from elsewhere.

    Raises:
        VerificationError: with what does not hold.
    """
    try:
        proven = open_receipt(receipt_to_proto(receipt), coordinator_public_keys)
    except (ReceiptInvalid, ValueError) as error:
        # ValueError: a key that is not 32 bytes, or an index that no log has.
        raise VerificationError(1, str(error)) from error
    return VerifiedEntry(entry=proven.entry, index=proven.index, checkpoint=proven.checkpoint)


def verify_growth(
    seen: Checkpoint | None,
    note: bytes,
    consistency_proof: Sequence[bytes],
    *,
    coordinator_public_keys: Iterable[bytes],
) -> Checkpoint:
    """Check that the coordinator's newest checkpoint extends one that was seen before; keep what is returned.

    1. The checkpoint is signed by one of `coordinator_public_keys`.
    2. It is of the same log, not smaller, and the proof shows that the log
       begins with all that it held when `seen` was signed.

    Args:
        seen: a checkpoint of `VerifiedEntry` or of an earlier call; None for a log never seen, taken on trust.
        note: the signed note as the coordinator sent it.

    Raises:
        VerificationError: with what does not hold. At step 2 the log was rewritten, or not shown to be the same;
            keep both notes, since together they are the evidence.
    """
    try:
        newest = open_checkpoint(note, coordinator_public_keys)
    except (CheckpointInvalid, ValueError) as error:
        raise VerificationError(1, str(error)) from error
    if seen is not None:
        try:
            signed_notes.verify_growth(seen, newest, consistency_proof)
        except LogRewritten as error:
            raise VerificationError(2, str(error)) from error
    return newest
