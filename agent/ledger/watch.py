"""Whether the coordinator's ledger only grows. Pure.

An agent keeps the newest checkpoint that it has accepted and demands of every
later one the proof that the log begins with all that was there before. What
it has once seen, the coordinator can then neither change nor take back
without being noticed.

The first checkpoint is taken on trust: before it there is nothing to compare.
A checkpoint that is refused never replaces the one kept, so that only a log
which extends what this node has seen is ever accepted again.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec

from protos.checkpoint import (
    NOTE_BYTES_MAX,
    Checkpoint,
    CheckpointInvalid,
    Fault,
    LogRewritten,
    open_checkpoint,
    verify_growth,
)
from protos.merkle import EMPTY_ROOT, HASH_BYTES, PROOF_HASHES_MAX


class Reason(Enum):
    """Why a checkpoint was refused."""

    # None that a key of the coordinator has signed.
    NOT_SIGNED = "not_signed"
    # Of another log than this coordinator's.
    OTHER_LOG = Fault.OTHER_LOG.value
    # Rolled back: entries that were there are gone.
    SMALLER = Fault.SMALLER.value
    # Forked: two logs of one size. Both notes together prove it to anybody.
    SAME_SIZE_OTHER_ROOT = Fault.SAME_SIZE_OTHER_ROOT.value
    # Forked or rewritten: not shown to begin with what was there.
    NOT_AN_EXTENSION = Fault.NOT_AN_EXTENSION.value


class Rewritten(msgspec.Struct, frozen=True, kw_only=True):
    """A refused checkpoint, with the bytes that were offered, as evidence."""

    reason: Reason
    detail: str
    note: bytes
    consistency_proof: tuple[bytes, ...]


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node remembers of its coordinator's log: the checkpoint kept, and one refused since."""

    # Empty for a log that was never seen.
    origin: str = ""
    size: int = 0
    root: bytes = EMPTY_ROOT
    # The signed note of the checkpoint kept.
    note: bytes = b""
    rewritten: Rewritten | None = None


class LedgerWatch:
    """One log, as one node sees it.

    Args:
        origin: the name of the coordinator's log.
        record: what was remembered; void where it is of another log, since the node has then joined another cluster.
    """

    def __init__(self, origin: str, record: LedgerRecord) -> None:
        self._record = record if record.origin == origin else LedgerRecord(origin=origin)

    @property
    def record(self) -> LedgerRecord:
        """What to remember."""
        return self._record

    @property
    def size(self) -> int:
        """Entries of the checkpoint kept: what the next consistency proof must begin from."""
        return self._record.size

    @property
    def rewritten(self) -> Rewritten | None:
        """Why no work is to be taken from this coordinator, if so."""
        return self._record.rewritten

    def accept(
        self, note: bytes, consistency_proof: Sequence[bytes], coordinator_keys: Sequence[bytes]
    ) -> Rewritten | None:
        """Judge the coordinator's newest checkpoint; None where it extends the one kept, and is kept from now on."""
        kept = Checkpoint(origin=self._record.origin, size=self._record.size, root=self._record.root)
        try:
            offered = open_checkpoint(note, coordinator_keys)
            verify_growth(kept, offered, consistency_proof)
        except CheckpointInvalid as error:
            reason, detail = Reason.NOT_SIGNED, str(error)
        except LogRewritten as error:
            reason, detail = Reason(error.fault.value), str(error)
        else:
            self._record = LedgerRecord(origin=offered.origin, size=offered.size, root=offered.root, note=note)
            return None
        found = _evidence(reason, detail, note, consistency_proof)
        # What anybody can write must not take the place of what the coordinator has signed.
        if self._record.rewritten is None or reason is not Reason.NOT_SIGNED:
            self._record = msgspec.structs.replace(self._record, rewritten=found)
        return found


def _evidence(reason: Reason, detail: str, note: bytes, consistency_proof: Sequence[bytes]) -> Rewritten:
    """Return what is to be kept of a refused checkpoint: no more than an honest one would have."""
    proof = tuple(part[:HASH_BYTES] for part in consistency_proof[:PROOF_HASHES_MAX])
    return Rewritten(reason=reason, detail=detail, note=note[:NOTE_BYTES_MAX], consistency_proof=proof)
