"""The log signs what is on the disk, and its receipts and proofs hold for whoever has the public key."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.log import TransparencyLog
from coordinator.ledger.testing import MemoryHashStore, filled_store
from protos.checkpoint import Checkpoint, Fault, LogRewritten, log_origin, open_checkpoint, verify_growth
from protos.receipt import open_receipt

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = [KEY.public_key().public_bytes_raw()]


def append(log: TransparencyLog, store: MemoryHashStore, entries: list[bytes]) -> None:
    extension = log.extended_by(entries)
    store.insert(extension.made)
    log.committed(extension)


def seen(log: TransparencyLog) -> Checkpoint:
    return open_checkpoint(log.checkpoint, KEYS)


@given(st.lists(st.lists(st.binary(max_size=20), max_size=9), max_size=9))
def test_every_group_commit_gives_a_checkpoint_that_extends_every_earlier_one(batches: list[list[bytes]]) -> None:
    store = MemoryHashStore()
    log = TransparencyLog("cluster-1", KEY, store)
    before, entries = [seen(log)], list[bytes]()
    for batch in batches:
        append(log, store, batch)
        entries += batch
        now = seen(log)
        assert (now.origin, now.size) == (log_origin("cluster-1"), len(entries))
        for old in before:
            update = log.update(old.size)
            verify_growth(old, open_checkpoint(update.checkpoint, KEYS), update.consistency_proof)
        before.append(now)
    proven = [open_receipt(receipt, KEYS) for receipt in log.receipts(list(enumerate(entries)))]
    assert [(one.index, one.entry) for one in proven] == list(enumerate(entries))
    assert {one.checkpoint for one in proven} <= {before[-1]}


def test_nothing_is_signed_before_it_is_committed() -> None:
    # Mutation: extended_by keeps the frontier, this log would sign entries that a failed commit has lost.
    store = MemoryHashStore()
    log = TransparencyLog("cluster-1", KEY, store)
    append(log, store, [b"a", b"b"])
    note = log.checkpoint
    log.extended_by([b"the commit of this one fails"])
    assert (log.checkpoint, log.size) == (note, 2)
    append(log, store, [b"c"])
    [receipt] = log.receipts([(2, b"c")])
    assert open_receipt(receipt, KEYS).index == 2


def test_a_restarted_log_goes_on_from_what_is_stored() -> None:
    store = MemoryHashStore()
    log = TransparencyLog("cluster-1", KEY, store)
    append(log, store, [b"%d" % number for number in range(11)])
    restarted = TransparencyLog("cluster-1", KEY, store)
    assert restarted.checkpoint == log.checkpoint
    append(restarted, store, [b"one more"])
    update = restarted.update(11)
    verify_growth(seen(log), open_checkpoint(update.checkpoint, KEYS), update.consistency_proof)


def test_a_restart_that_has_lost_hashes_does_not_start() -> None:
    store = MemoryHashStore()
    made = TransparencyLog("cluster-1", KEY, store).extended_by([b"a", b"b"]).made
    store.insert({position: value for position, value in made.items() if position.level == 0})
    with pytest.raises(KeyError):
        TransparencyLog("cluster-1", KEY, store)


def test_an_entry_that_no_checkpoint_covers_yet_has_no_receipt() -> None:
    store = MemoryHashStore()
    log = TransparencyLog("cluster-1", KEY, store)
    append(log, store, [b"a"])
    assert [receipt.index for receipt in log.receipts([(0, b"a"), (1, b"committed just now")])] == [0]


def test_a_log_that_was_rolled_back_convicts_itself() -> None:
    store = MemoryHashStore()
    log = TransparencyLog("cluster-1", KEY, store)
    append(log, store, [b"a", b"b"])
    before = seen(log)
    restored = TransparencyLog("cluster-1", KEY, filled_store([b"a"])[0])
    update = restored.update(before.size)
    with pytest.raises(LogRewritten) as caught:
        verify_growth(before, open_checkpoint(update.checkpoint, KEYS), update.consistency_proof)
    assert caught.value.fault is Fault.SMALLER
