"""The ledger's public face: one append-only log of entries, a signed checkpoint for each group commit, and proofs.

    extension = log.extended_by(entries)     before the commit
    ... store the entries and extension.made in one transaction ...
    log.committed(extension)                 after it: only now the new checkpoint is signed

A checkpoint that anybody has seen binds the coordinator for ever. So none is
signed before its entries are on the disk, and after a crash the log goes on
from what the database holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.ledger.merkle import load_frontier, prove_consistency, prove_inclusion
from coordinator.ledger.port import HashStore
from protos.checkpoint import Checkpoint, log_origin, sign_checkpoint
from protos.merkle import Extension, Frontier, extend
from protos.slackwater.common.v1 import receipt_pb2


@dataclass(frozen=True, slots=True)
class _Signed:
    """What the world may see: replaced as a whole, so that readers in other threads never mix two states."""

    frontier: Frontier
    note: bytes


class TransparencyLog:
    """The log of one coordinator: one thread appends, others may make proofs meanwhile. Calls block on the store."""

    def __init__(self, cluster_id: str, key: Ed25519PrivateKey, hashes: HashStore) -> None:
        self._origin = log_origin(cluster_id)
        self._key = key
        self._hashes = hashes
        self._signed = self._sign(load_frontier(hashes, hashes.log_size()))

    @property
    def size(self) -> int:
        """Entries under the newest checkpoint."""
        return self._signed.frontier.size

    @property
    def checkpoint(self) -> bytes:
        """The newest signed note."""
        return self._signed.note

    def extended_by(self, entries: Sequence[bytes]) -> Extension:
        """Return the log with these entries, and the hashes to be stored with them. Changes nothing."""
        return extend(self._signed.frontier, entries)

    def committed(self, extension: Extension) -> None:
        """Take over, and sign, what is on the disk now."""
        self._signed = self._sign(extension.frontier)

    def receipts(self, entries: Sequence[tuple[int, bytes]]) -> list[receipt_pb2.Receipt]:
        """Return the proofs for entries, given with their indexes, all under the newest checkpoint.

        An entry that was committed after that checkpoint was signed is left out: the next one covers it.
        """
        signed = self._signed
        return [
            receipt_pb2.Receipt(
                entry=entry,
                index=index,
                inclusion_proof=prove_inclusion(self._hashes, index, signed.frontier.size),
                checkpoint=signed.note,
            )
            for index, entry in entries
            if index < signed.frontier.size
        ]

    def update(self, old_size: int) -> receipt_pb2.CheckpointUpdate:
        """Return the newest checkpoint, and the proof that it extends the log of `old_size` entries.

        Of a log that has fewer entries, as after a database was restored from
        a backup, nothing can be shown but that: the note goes without a proof.
        """
        signed = self._signed
        proof = []
        if old_size <= signed.frontier.size:
            proof = prove_consistency(self._hashes, old_size, signed.frontier.size)
        return receipt_pb2.CheckpointUpdate(checkpoint=signed.note, consistency_proof=proof)

    def _sign(self, frontier: Frontier) -> _Signed:
        checkpoint = Checkpoint(origin=self._origin, size=frontier.size, root=frontier.root())
        return _Signed(frontier, sign_checkpoint(checkpoint, self._key))
