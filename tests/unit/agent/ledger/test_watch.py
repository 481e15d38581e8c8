"""An agent notices a ledger that was rewritten: one forged field at a time, over real signatures and proofs."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from agent.ledger.file import FILE_BYTES_MAX, LEDGER_FILE, load_ledger_record, store_ledger_record
from agent.ledger.watch import LedgerRecord, LedgerWatch, Reason
from protos.checkpoint import Checkpoint, log_origin, sign_checkpoint
from protos.merkle import Frontier, extend, leaf_hash, node_hash

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = (KEY.public_key().public_bytes_raw(),)
ORIGIN = log_origin("cluster-1")
SEEN, NOW = 6, 9


def root_of(entries: list[bytes]) -> bytes:
    return extend(Frontier(), entries).frontier.root()


def consistency(entries: list[bytes], old: int) -> list[bytes]:
    """SUBPROOF of RFC 9162, section 2.1.4.1, on the entries themselves: the agent has no prover."""

    def subproof(start: int, end: int, whole: bool) -> list[bytes]:
        if end == old:
            return [] if whole else [root_of(entries[start:end])]
        middle = start + (1 << (end - start - 1).bit_length() - 1)
        if old <= middle:
            return [*subproof(start, middle, whole), root_of(entries[middle:end])]
        return [*subproof(middle, end, False), root_of(entries[start:middle])]

    return [] if old in (0, len(entries)) else subproof(0, len(entries), True)


ENTRIES = [b"entry %d" % number for number in range(NOW)]


@dataclass(frozen=True)
class Offer:
    """What a coordinator answers; each forged one below differs from the honest one in one field."""

    origin: str = ORIGIN
    entries: tuple[bytes, ...] = tuple(ENTRIES)
    proof: tuple[bytes, ...] = field(default_factory=lambda: tuple(consistency(ENTRIES, SEEN)))
    key: Ed25519PrivateKey = KEY

    def note(self) -> bytes:
        root = root_of(list(self.entries))
        return sign_checkpoint(Checkpoint(origin=self.origin, size=len(self.entries), root=root), self.key)


HONEST = Offer()
REWRITTEN = (b"entry 0", b"another past", *ENTRIES[2:])

FORGED = {
    "origin_fail": (replace(HONEST, origin=log_origin("cluster-2")), Reason.OTHER_LOG),
    "size-rolled-back_fail": (replace(HONEST, entries=tuple(ENTRIES[: SEEN - 1]), proof=()), Reason.SMALLER),
    "size-zero_fail": (replace(HONEST, entries=(), proof=()), Reason.SMALLER),
    "root-at-same-size_fail": (replace(HONEST, entries=REWRITTEN[:SEEN], proof=()), Reason.SAME_SIZE_OTHER_ROOT),
    "root-fork_fail": (replace(HONEST, entries=REWRITTEN), Reason.NOT_AN_EXTENSION),
    "root-fork-with-own-proof_fail": (
        replace(HONEST, entries=REWRITTEN, proof=tuple(consistency(list(REWRITTEN), SEEN))),
        Reason.NOT_AN_EXTENSION,
    ),
    "proof-empty_fail": (replace(HONEST, proof=()), Reason.NOT_AN_EXTENSION),
    "proof-zeros_fail": (replace(HONEST, proof=(bytes(32),) * len(HONEST.proof)), Reason.NOT_AN_EXTENSION),
    "proof-of-another-size_fail": (replace(HONEST, proof=tuple(consistency(ENTRIES, 5))), Reason.NOT_AN_EXTENSION),
    "proof-extended_fail": (replace(HONEST, proof=(*HONEST.proof, bytes(32))), Reason.NOT_AN_EXTENSION),
    "proof-reversed_fail": (replace(HONEST, proof=HONEST.proof[::-1]), Reason.NOT_AN_EXTENSION),
    "key_fail": (replace(HONEST, key=Ed25519PrivateKey.from_private_bytes(bytes(32))), Reason.NOT_SIGNED),
}


def watch_that_has_seen(size: int = SEEN) -> LedgerWatch:
    watch = LedgerWatch(ORIGIN, LedgerRecord())
    first = Offer(entries=tuple(ENTRIES[:size]), proof=())
    assert watch.accept(first.note(), first.proof, KEYS) is None
    return watch


def test_the_first_checkpoint_is_taken_on_trust_and_remembered() -> None:
    watch = LedgerWatch(ORIGIN, LedgerRecord())
    assert watch.size == 0
    note = HONEST.note()
    assert watch.accept(note, (), KEYS) is None
    assert watch.record == LedgerRecord(origin=ORIGIN, size=NOW, root=root_of(ENTRIES), note=note)


def test_a_log_that_grew_is_accepted_and_kept() -> None:
    watch = watch_that_has_seen()
    assert watch.accept(HONEST.note(), HONEST.proof, KEYS) is None
    assert watch.size == NOW
    assert watch.rewritten is None


def test_a_log_that_has_not_grown_is_accepted() -> None:
    watch = watch_that_has_seen(NOW)
    assert watch.accept(HONEST.note(), (), KEYS) is None
    assert watch.size == NOW


@pytest.mark.parametrize("name", FORGED)
def test_each_forged_field_is_refused_with_a_reason_of_its_own(name: str) -> None:
    # Mutation: `new.size < old.size` in verify_growth left out, the rolled back ones are not called SMALLER.
    # Mutation: the record replaced also when refused, the last line fails.
    forged, reason = FORGED[name]
    watch = watch_that_has_seen()
    kept = watch.record.note
    found = watch.accept(forged.note(), forged.proof, KEYS)
    assert found is not None
    assert (found.reason, found.note, found.consistency_proof) == (reason, forged.note(), forged.proof)
    assert found.detail
    assert watch.rewritten == found
    assert (watch.size, watch.record.note) == (SEEN, kept)


@given(st.data())
def test_any_flipped_bit_of_an_answer_is_refused(data: st.DataObject) -> None:
    parts = [HONEST.note(), *HONEST.proof]
    place = data.draw(st.integers(0, len(parts) - 1))
    bit = data.draw(st.integers(0, 8 * len(parts[place]) - 1))
    changed = bytearray(parts[place])
    changed[bit // 8] ^= 1 << bit % 8
    parts[place] = bytes(changed)
    assert watch_that_has_seen().accept(parts[0], parts[1:], KEYS) is not None


def test_only_a_log_that_extends_what_was_seen_ends_a_refusal() -> None:
    watch = watch_that_has_seen()
    fork, _ = FORGED["root-at-same-size_fail"]
    assert watch.accept(fork.note(), fork.proof, KEYS) is not None
    # The fork goes on: consistent with itself, and not with what was seen before it.
    grown = [*REWRITTEN, b"more"]
    longer = Offer(entries=tuple(grown), proof=tuple(consistency(grown, SEEN)))
    assert watch.accept(longer.note(), longer.proof, KEYS) is not None
    assert watch.accept(HONEST.note(), HONEST.proof, KEYS) is None
    assert watch.rewritten is None


def test_garbage_does_not_take_the_place_of_what_the_coordinator_signed() -> None:
    watch = watch_that_has_seen()
    fork, _ = FORGED["root-at-same-size_fail"]
    evidence = watch.accept(fork.note(), fork.proof, KEYS)
    found = watch.accept(b"garbage", (), KEYS)
    assert found is not None
    assert found.reason is Reason.NOT_SIGNED
    assert watch.rewritten == evidence


def test_a_record_of_another_cluster_is_void() -> None:
    record = watch_that_has_seen().record
    elsewhere = LedgerWatch(log_origin("cluster-2"), record)
    assert elsewhere.record == LedgerRecord(origin=log_origin("cluster-2"))


def test_what_is_remembered_outlives_a_restart(tmp_path: Path) -> None:
    # Mutation: `rewritten` left out of the record, a restart would take work from a coordinator that was caught.
    assert load_ledger_record(tmp_path) == LedgerRecord()
    watch = watch_that_has_seen()
    fork, _ = FORGED["root-fork_fail"]
    watch.accept(fork.note(), fork.proof, KEYS)
    store_ledger_record(watch.record, tmp_path)
    assert load_ledger_record(tmp_path) == watch.record
    assert (tmp_path / LEDGER_FILE).stat().st_mode & 0o777 == 0o600
    restarted = LedgerWatch(ORIGIN, load_ledger_record(tmp_path))
    assert restarted.rewritten is not None
    assert restarted.accept(HONEST.note(), HONEST.proof, KEYS) is None


def test_the_largest_evidence_fits_the_file_and_is_no_larger_than_an_honest_answer(tmp_path: Path) -> None:
    watch = watch_that_has_seen()
    assert watch.accept(b"x" * 1_000_000, [b"y" * 1_000_000] * 1_000, KEYS) is not None
    store_ledger_record(watch.record, tmp_path)
    assert (tmp_path / LEDGER_FILE).stat().st_size < FILE_BYTES_MAX
    assert load_ledger_record(tmp_path) == watch.record


@pytest.mark.parametrize("content", [b"", b"{", b'{"size": "many"}', b'{"unknown": 1}', b"\xff" * FILE_BYTES_MAX])
def test_a_damaged_file_is_said_so_and_begins_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LEDGER_FILE).write_bytes(content)
    assert load_ledger_record(tmp_path) == LedgerRecord()


def test_the_helper_of_this_test_hashes_as_the_standard_says() -> None:
    left, right = leaf_hash(b"a"), leaf_hash(b"b")
    assert root_of([b"a", b"b"]) == node_hash(left, right) == hashlib.sha256(b"\x01" + left + right).digest()
