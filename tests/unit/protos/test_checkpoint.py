"""Signed checkpoints: one way to write them, and any other byte refused."""

import base64
import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.merkle import prove_consistency
from coordinator.ledger.testing import filled_store
from protos.checkpoint import (
    NOTE_BYTES_MAX,
    Checkpoint,
    CheckpointInvalid,
    Fault,
    LogRewritten,
    log_origin,
    open_checkpoint,
    sign_checkpoint,
    verify_growth,
)
from protos.signing import TASK_TYPE, pae, seal

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw()
OTHER_PUBLIC = OTHER_KEY.public_key().public_bytes_raw()
CHECKPOINT = Checkpoint(origin=log_origin("cluster-1"), size=1234, root=bytes(range(32)))
NOTE = sign_checkpoint(CHECKPOINT, KEY)


def test_a_note_is_written_as_c2sp_says() -> None:
    # The key hash is SHA-256(name, newline, 0x01, key), of which the first four bytes.
    name = b"slackwater-ledger/cluster-1"
    text = name + b"\n1234\n" + base64.b64encode(bytes(range(32))) + b"\n"
    key_hash = hashlib.sha256(name + b"\n\x01" + PUBLIC).digest()[:4]
    signature = base64.b64encode(key_hash + KEY.sign(text))
    assert text + b"\n" + "— ".encode() + name + b" " + signature + b"\n" == NOTE


@given(st.integers(0, (1 << 63) - 1), st.binary(min_size=32, max_size=32))
def test_what_was_signed_is_what_is_read(size: int, root: bytes) -> None:
    checkpoint = Checkpoint(origin=log_origin("c"), size=size, root=root)
    assert open_checkpoint(sign_checkpoint(checkpoint, KEY), [OTHER_PUBLIC, PUBLIC]) == checkpoint


@pytest.mark.parametrize("place", range(len(NOTE)))
def test_any_flipped_bit_of_any_byte_is_refused(place: int) -> None:
    # Mutation: the comparison with the note written again left out, flips in the signature's name pass.
    for bit in range(8):
        changed = bytearray(NOTE)
        changed[place] ^= 1 << bit
        with pytest.raises(CheckpointInvalid):
            open_checkpoint(bytes(changed), [PUBLIC, OTHER_PUBLIC])


@given(st.integers(0, len(NOTE)), st.integers(0, len(NOTE)), st.binary(max_size=8))
def test_any_piece_replaced_dropped_or_added_is_refused(start: int, end: int, piece: bytes) -> None:
    changed = NOTE[: min(start, end)] + piece + NOTE[max(start, end) :]
    if changed == NOTE:
        return
    with pytest.raises(CheckpointInvalid):
        open_checkpoint(changed, [PUBLIC])


@given(st.binary(max_size=300))
def test_garbage_is_refused(note: bytes) -> None:
    with pytest.raises(CheckpointInvalid):
        open_checkpoint(note, [PUBLIC])


LINES = NOTE.decode().split("\n")


@pytest.mark.parametrize(
    "note",
    [
        "\n".join([LINES[0], "01234", *LINES[2:]]),
        "\n".join([LINES[0], "+1234", *LINES[2:]]),
        "\n".join([LINES[0], "1_234", *LINES[2:]]),
        "\n".join([LINES[0], "١٢٣٤", *LINES[2:]]),
        "\n".join([LINES[0], "-1", *LINES[2:]]),
        "\n".join([LINES[0], str(1 << 63), *LINES[2:]]),
        "\n".join([*LINES[:3], "an extension", *LINES[3:]]),
        "\n".join([*LINES[:4], LINES[4], LINES[4], ""]),
        "\n".join([*LINES[:4], LINES[4].replace("cluster-1", "cluster-2"), ""]),
        "\n".join(LINES[:4]) + "\n",
        "\n".join(LINES[:-1]),
        NOTE.decode().replace("\n", "\r\n"),
        NOTE.decode() + "\n",
        "another-log\n" + "\n".join(LINES[1:]),
        NOTE.decode() + "x" * NOTE_BYTES_MAX,
        "",
    ],
)
def test_every_other_spelling_is_refused(note: str) -> None:
    with pytest.raises(CheckpointInvalid):
        open_checkpoint(note.encode(), [PUBLIC])


def test_another_key_and_no_key_are_refused() -> None:
    for keys in ([OTHER_PUBLIC], []):
        with pytest.raises(CheckpointInvalid, match="not trusted"):
            open_checkpoint(NOTE, keys)


def test_two_keys_may_sign_while_they_rotate_and_both_must_be_trusted() -> None:
    both = NOTE + sign_checkpoint(CHECKPOINT, OTHER_KEY).split(b"\n\n")[1]
    assert open_checkpoint(both, [PUBLIC, OTHER_PUBLIC]) == CHECKPOINT
    with pytest.raises(CheckpointInvalid):
        open_checkpoint(both, [PUBLIC])


def test_a_signature_of_a_task_is_none_of_a_checkpoint_nor_the_other_way() -> None:
    text = NOTE.split(b"\n\n")[0] + b"\n"
    task = seal(TASK_TYPE, text, KEY)
    assert not pae(TASK_TYPE, text).startswith(CHECKPOINT.origin.encode())
    head, line = NOTE.split(b"\n\n")
    name, value = line.rsplit(b" ", 1)
    forged = base64.b64decode(value)[:4] + task.signatures[0].signature
    with pytest.raises(CheckpointInvalid, match="does not hold"):
        open_checkpoint(head + b"\n\n" + name + b" " + base64.b64encode(forged) + b"\n", [PUBLIC])


def checkpoint_of(size: int, *, changed: int | None = None) -> Checkpoint:
    _, frontier = filled_store(b"entry" if number == changed else b"%d" % number for number in range(size))
    return Checkpoint(origin=CHECKPOINT.origin, size=frontier.size, root=frontier.root())


def test_a_log_that_grew_is_let_through() -> None:
    store, _ = filled_store(b"%d" % number for number in range(9))
    verify_growth(checkpoint_of(6), checkpoint_of(9), prove_consistency(store, 6, 9))
    verify_growth(checkpoint_of(0), checkpoint_of(9), [])
    verify_growth(checkpoint_of(9), checkpoint_of(9), [])


@pytest.mark.parametrize(
    ("new", "fault"),
    [
        (Checkpoint(origin=log_origin("cluster-2"), size=9, root=checkpoint_of(9).root), Fault.OTHER_LOG),
        (checkpoint_of(5), Fault.SMALLER),
        (checkpoint_of(0), Fault.SMALLER),
        (checkpoint_of(6, changed=2), Fault.SAME_SIZE_OTHER_ROOT),
        (checkpoint_of(9, changed=2), Fault.NOT_AN_EXTENSION),
    ],
)
def test_each_way_of_rewriting_has_its_own_fault(new: Checkpoint, fault: Fault) -> None:
    store, _ = filled_store(b"%d" % number for number in range(9))
    with pytest.raises(LogRewritten) as caught:
        verify_growth(checkpoint_of(6), new, prove_consistency(store, 6, 9))
    assert caught.value.fault is fault


def test_a_log_that_grew_without_a_proof_is_not_let_through() -> None:
    with pytest.raises(LogRewritten, match="empty"):
        verify_growth(checkpoint_of(6), checkpoint_of(9), [])
