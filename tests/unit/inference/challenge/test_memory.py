"""The memory challenge: an honest walk passes; less memory, a prepared walk and made-up openings are refused."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from inference.challenge.arithmetic import NumpyArithmetic
from inference.challenge.commitment import Opening
from inference.challenge.context import ChallengeContext, ProofRejected, key_from
from inference.challenge.expansion import CENTRE, MODULUS, expand
from inference.challenge.memory import STATE_COLUMNS, MemoryProver, MemorySize, states_asked, walk_path
from inference.challenge.memory_check import MemoryClaim, block_rows, verify_memory
from inference.challenge.testing import (
    CONTEXT,
    MEMORY_SIZE,
    OTHERS,
    SECRET,
    WALK_NONCE,
    ForgetfulArithmetic,
    StartFromElsewhere,
    committed,
    opened,
    walked,
)

STEPS = (3, 17, 30, 31, 40, 55, 61, 62)
BLOCKS = (0, 7, 23)
ROWS = 2
Answer = tuple[MemoryClaim, list[Opening], list[Opening]]


def reason(answer: Answer, context: ChallengeContext = CONTEXT, size: MemorySize = MEMORY_SIZE) -> str:
    """Return why an answer is refused; empty where it is accepted."""
    claim, states, sketches = answer
    try:
        verify_memory(context, size, claim, states, sketches, rows=ROWS, secret=SECRET)
    except ProofRejected as error:
        return str(error)
    return ""


def answered(arithmetic: NumpyArithmetic, context: ChallengeContext = CONTEXT) -> Answer:
    return walked(MemoryProver(context, MEMORY_SIZE, arithmetic), STEPS, BLOCKS)


@pytest.fixture(scope="module")
def honest() -> Answer:
    return answered(NumpyArithmetic())


def with_states(answer: Answer, contents: dict[int, bytes]) -> Answer:
    """Return the answer of a prover that commits to other states, and opens them in good order."""
    claim, states, sketches = answer
    known = {opening.index: opening.content for opening in states} | contents
    root, openings = opened([known.get(i, bytes([i])) for i in range(MEMORY_SIZE.states)], states_asked(STEPS))
    return replace(claim, walk_root=root), openings, sketches


def changed(content: bytes, at: int) -> bytes:
    entry = int(np.frombuffer(content, dtype=np.int8)[at])
    other = (entry + CENTRE + 1) % MODULUS - CENTRE
    return content[:at] + other.to_bytes(1, "little", signed=True) + content[at + 1 :]


def test_an_honest_walk_passes_whatever_is_drawn(honest: Answer) -> None:
    assert reason(honest) == ""
    assert reason(walked(MemoryProver(CONTEXT, MEMORY_SIZE, NumpyArithmetic()), (0,), (5,))) == ""


def test_a_block_is_what_its_definition_says() -> None:
    n = MEMORY_SIZE.columns
    seed = MEMORY_SIZE.seed(CONTEXT)
    left = expand(key_from(seed, "left"), 0, 3 * n, n).astype(np.int64)
    right = expand(key_from(seed, "right"), 0, n, n).astype(np.int64)
    rows = np.array([5, 2 * n + 1, n - 1], dtype=np.uint64)
    wanted = ((left @ right.T) % MODULUS) ** 3
    found = block_rows(CONTEXT, MEMORY_SIZE, rows).astype(np.int64)
    assert np.array_equal(found % MODULUS, wanted[rows.astype(np.int64)] % MODULUS)


def test_memory_that_is_not_there_is_seen_on_the_walk() -> None:
    # Mutation seen to fail: transitions not compared.
    for lost in (range(6), range(12), range(MEMORY_SIZE.blocks)):
        assert "does not lead to" in reason(answered(ForgetfulArithmetic(lost)))


def test_keeping_half_of_every_block_s_rows_is_seen() -> None:
    """Every state after the start is half wrong, so 16 rows drawn pass with 2^-16."""

    class HalfRows(NumpyArithmetic):
        def multiply_sum(self, left: np.ndarray, rights: Sequence[np.ndarray]) -> np.ndarray:
            state = super().multiply_sum(left, rights)
            state[:, ::2] = 0
            return state

    assert "does not lead to" in reason(answered(HalfRows()))


def test_a_walk_from_a_start_chosen_before_is_refused() -> None:
    # Mutation seen to fail: the start not compared.
    assert "does not start" in reason(answered(StartFromElsewhere()))


def test_a_walk_for_another_nonce_is_refused(honest: Answer) -> None:
    claim, states, sketches = honest
    assert reason((replace(claim, walk_nonce=b"the nonce that came too late"), states, sketches)) != ""
    # Nor does it go on as that walk would, where its start is put right.
    path = walk_path(CONTEXT, MEMORY_SIZE, b"the nonce that came too late", claim.fill_root)
    start = expand(path.start_key(), 0, STATE_COLUMNS, MEMORY_SIZE.columns).tobytes()
    claim, states, sketches = with_states(honest, {0: start})
    found = reason((replace(claim, walk_nonce=b"the nonce that came too late"), states, sketches))
    assert "does not lead to" in found


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_another_nonce_node_boot_or_certificate_replayed_is_refused(other: ChallengeContext) -> None:
    assert reason(answered(NumpyArithmetic(), other)) != ""


def test_a_replayed_fill_is_refused_though_the_walk_on_it_is_new() -> None:
    """The root of an earlier fill, sketches and all, with a walk over the right blocks."""
    claim, states, _ = answered(NumpyArithmetic())
    old, _, sketches = answered(NumpyArithmetic(), OTHERS["nonce"])
    assert "does not start" in reason((replace(claim, fill_root=old.fill_root), states, sketches))


def test_a_fill_committed_to_before_it_was_computed_is_refused() -> None:
    # Mutation seen to fail: sketches not compared.
    class EmptySketches(NumpyArithmetic):
        def multiply(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
            product = super().multiply(left, right)
            return product * 0 if len(left) == STATE_COLUMNS else product

    assert "sketch of block 0" in reason(answered(EmptySketches()))


@pytest.mark.parametrize("step", STEPS)
def test_one_made_up_step_that_is_drawn_is_refused(honest: Answer, step: int) -> None:
    after = next(opening for opening in honest[1] if opening.index == step + 1)
    made_up = bytes(np.random.default_rng(step).integers(0, CENTRE, len(after.content), dtype=np.uint8))
    assert "does not lead to" in reason(with_states(honest, {step + 1: made_up}))


def test_a_walk_that_was_once_put_at_zero_does_not_stay_there_for_nothing(honest: Answer) -> None:
    # Mutation seen to fail: the walk's steps without the 1.
    start = {0: honest[1][0].content}
    at_zero = dict.fromkeys(range(1, MEMORY_SIZE.states), bytes(MEMORY_SIZE.state_bytes))
    assert "does not lead to" in reason(with_states(honest, start | at_zero))


@pytest.mark.parametrize("content", [b"", bytes(1), bytes(512), b"\x05" * 512, b"\x80" * 512, bytes(511), bytes(513)])
def test_states_and_sketches_without_work_are_refused(honest: Answer, content: bytes) -> None:
    claim, states, _ = honest
    assert reason(with_states(honest, dict.fromkeys(range(MEMORY_SIZE.states), content))) != ""
    start = {0: states[0].content}
    assert reason(with_states(honest, dict.fromkeys(range(MEMORY_SIZE.states), content) | start)) != ""
    root, empty = opened([content] * MEMORY_SIZE.blocks, BLOCKS)
    assert reason((replace(claim, fill_root=root), states, empty)) != ""


def test_sketches_without_work_are_refused_even_with_a_walk_that_follows_them() -> None:
    """The walk's start depends on the fill's root; so the walk is made anew over the root of nothing."""

    class Nothing(MemoryProver[np.ndarray]):
        def fill(self) -> bytes:
            super().fill()
            self._sketches = [bytes(MEMORY_SIZE.state_bytes)] * MEMORY_SIZE.blocks
            self._fill = committed(self._sketches)
            return self._fill.root

    assert "sketch of block" in reason(walked(Nothing(CONTEXT, MEMORY_SIZE, NumpyArithmetic()), STEPS, BLOCKS))


def test_what_is_opened_is_what_was_committed_to_and_asked_for(honest: Answer) -> None:
    claim, states, sketches = honest
    assert "were asked for" in reason((claim, [], []))
    assert "were asked for" in reason((claim, states[1:], sketches))
    assert "were asked for" in reason((claim, states, sketches[:-1]))
    assert "were asked for" in reason((claim, states[::-1], sketches))
    wrong = [replace(states[0], content=changed(states[0].content, 9)), *states[1:]]
    assert "committed" in reason((claim, wrong, sketches))
    wrong = [replace(sketches[0], content=changed(sketches[0].content, 9)), *sketches[1:]]
    assert "committed" in reason((claim, states, wrong))
    assert "committed" in reason((claim, [replace(states[0], proof=()), *states[1:]], sketches))
    assert "committed" in reason((replace(claim, walk_root=bytes(32)), states, sketches))
    # A sketch of another block under this one's number.
    swapped = [replace(sketches[1], index=0), *sketches[1:]]
    assert "committed" in reason((claim, states, swapped))


def test_a_number_in_another_spelling_is_refused(honest: Answer) -> None:
    state = next(opening for opening in honest[1] if opening.index == STEPS[0])
    entries = np.frombuffer(state.content, dtype=np.int8).copy()
    place = int(np.argmax(entries))
    entries[place] = int(entries[place]) - MODULUS if entries[place] > 122 else -127
    assert "outside" in reason(with_states(honest, {STEPS[0]: entries.tobytes()}))


def test_which_blocks_a_step_reads_follows_from_its_state() -> None:
    path = walk_path(CONTEXT, MEMORY_SIZE, WALK_NONCE, bytes(32))
    chosen = [path.chosen(step, bytes([state]) * 32) for step in range(20) for state in range(20)]
    assert len(set(map(tuple, chosen))) > 390
    assert {block for blocks in chosen for block in blocks} == set(range(MEMORY_SIZE.blocks))


def test_a_check_without_a_draw_or_a_secret_is_no_check(honest: Answer) -> None:
    claim, states, sketches = honest
    for wrong, rows, secret in (
        (replace(claim, steps=()), ROWS, SECRET),
        (replace(claim, blocks=()), ROWS, SECRET),
        (claim, 0, SECRET),
        (claim, ROWS, b"short"),
    ):
        with pytest.raises(ValueError, match="needed"):
            verify_memory(CONTEXT, MEMORY_SIZE, wrong, states, sketches, rows=rows, secret=secret)
    with pytest.raises(ValueError, match="nonce"):
        walk_path(CONTEXT, MEMORY_SIZE, b"short", bytes(32))


@pytest.mark.parametrize(
    "change",
    [
        {"columns": 60},
        {"columns": 16},
        {"blocks": 0},
        {"blocks": (1 << 20) + 1},
        {"blocks_per_step": 0},
        {"blocks_per_step": 2148},
        {"steps": 64},
        {"steps": 0},
        {"steps": (1 << 22) - 1},
    ],
)
def test_a_size_that_overflows_or_shows_nothing_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"columns|blocks|steps|states"):
        replace(MEMORY_SIZE, **change)


def test_each_part_comes_after_the_one_before() -> None:
    prover = MemoryProver(CONTEXT, MEMORY_SIZE, NumpyArithmetic())
    with pytest.raises(ValueError, match="after the fill"):
        prover.walk(WALK_NONCE)
    prover.fill()
    with pytest.raises(ValueError, match="after the walk"):
        prover.open([1], [1])
    prover.walk(WALK_NONCE)
    for steps, blocks in (([63], [1]), ([1], [24]), ([-1], [1])):
        with pytest.raises(ValueError, match="not all among"):
            prover.open(steps, blocks)
