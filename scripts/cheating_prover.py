"""A prover that cheats, for tests: what it answers is not what it was asked to work out.

    cheating_prover.py CHEAT FILE --device ... (as inference/challenge/prover.py is called)

With "-unbound" behind it, a cheat is for a coordinator that leaves the binding out.
FILE is where it keeps an answer from one challenge to the next.
"""

import fcntl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

CHEAT, ANSWERS = sys.argv[1], Path(sys.argv[2])
del sys.argv[1:3]
sys.path.append(str(Path(__file__).resolve().parent.parent))

from inference.challenge import prover  # noqa: E402  # The package's root has to be on the path first.
from inference.challenge.commitment import CommitmentTree  # noqa: E402
from inference.challenge.context import ChallengeContext, key_from  # noqa: E402
from inference.challenge.expansion import Residues  # noqa: E402
from inference.challenge.memory import STATE_COLUMNS, MemoryProver, states_asked  # noqa: E402
from inference.challenge.testing import ForgetfulArithmetic, leave_out_binding  # noqa: E402
from protos.merkle import leaf_hash  # noqa: E402
from protos.slackwater.node.v1 import challenge_pb2 as pb  # noqa: E402

Session = prover.ProverSession[Residues]
Answer = Callable[[Session, pb.ChallengeQuestion], Iterator[pb.ChallengeReply]]
# Beside which the rest of a small challenge is nothing, on a busy machine too.
CARD_S: Final = 2.0
HONEST: Final[Answer] = prover.ProverSession.replies


def replay(session: Session, question: pb.ChallengeQuestion) -> Iterator[pb.ChallengeReply]:
    """Answer the first question, and end before it is checked; send the same to whatever is asked later."""
    number = question.WhichOneof("question") or ""
    stored = ANSWERS.with_name(f"{ANSWERS.name}.{number}")
    if not stored.exists():
        replies = list(HONEST(session, question))
        stored.write_bytes(b"".join(len(one := r.SerializeToString()).to_bytes(4, "big") + one for r in replies))
        if number == "compute_draw":
            sys.exit(0)
        yield from replies
        return
    with stored.open("rb") as file:
        while head := file.read(4):
            reply = pb.ChallengeReply.FromString(file.read(int.from_bytes(head, "big")))
            kind = reply.WhichOneof("reply")
            assert kind is not None
            # The work is old; its name is not.
            getattr(reply, kind).challenge_id = getattr(question, number).challenge_id
            yield reply


def made_up(content: Callable[[int], bytes], *, of: str) -> Answer:
    """Answer with made-up contents, properly committed to; what is not `of` this kind is worked out."""
    asked: list[pb.ChallengeQuestion] = []

    def answer(session: Session, question: pb.ChallengeQuestion) -> Iterator[pb.ChallengeReply]:
        kind = question.WhichOneof("question") or ""
        if not kind.startswith(of):
            yield from HONEST(session, question)
            return
        if kind in ("compute_challenge", "memory_challenge"):
            asked[:] = [question]
        yield from _made_up(asked[0], question, content)

    return answer


def _made_up(
    first: pb.ChallengeQuestion, question: pb.ChallengeQuestion, content: Callable[[int], bytes]
) -> Iterator[pb.ChallengeReply]:
    compute, memory = first.compute_challenge, first.memory_challenge
    result = content(compute.rows * compute.columns)
    state = content(STATE_COLUMNS * memory.columns)
    chains = _tree(result, compute.chains)
    blocks = _tree(state, memory.blocks)
    states = _tree(state, memory.steps + 1)

    def opening(tree: CommitmentTree, index: int, what: bytes) -> pb.Opening:
        made = tree.opening(index, what)
        return pb.Opening(index=index, content=what, proof=made.proof if what else ())

    match question.WhichOneof("question"):
        case "compute_challenge":
            root = pb.ComputeCommitment(challenge_id=compute.challenge_id, root=chains.root if result else b"")
            yield pb.ChallengeReply(compute_commitment=root)
        case "compute_draw":
            for chain in question.compute_draw.chains:
                answer = pb.ComputeAnswer(challenge_id=compute.challenge_id, result=opening(chains, chain, result))
                yield pb.ChallengeReply(compute_answer=answer)
        case "memory_challenge":
            fill = pb.MemoryCommitment(challenge_id=memory.challenge_id, fill_root=blocks.root if state else b"")
            yield pb.ChallengeReply(memory_commitment=fill)
        case "memory_walk":
            walk = pb.MemoryWalkCommitment(challenge_id=memory.challenge_id, walk_root=states.root if state else b"")
            yield pb.ChallengeReply(memory_walk_commitment=walk)
        case _:
            draw = question.memory_draw
            opened = pb.MemoryOpening(
                challenge_id=memory.challenge_id,
                states=[opening(states, index, state) for index in states_asked(draw.steps)],
                sketches=[opening(blocks, index, state) for index in draw.blocks],
            )
            yield pb.ChallengeReply(memory_opening=opened)


def _tree(content: bytes, leaves: int) -> CommitmentTree:
    return CommitmentTree([leaf_hash(content)] * max(leaves, 1))


def bound_to(**other: bytes | str) -> None:
    """Answer as if the question had been put to somebody else, or at another time."""

    def context(session: Session, nonce: bytes) -> ChallengeContext:
        own = (session._node_id, session._boot_id, session._certificate_sha256)
        names = ("nonce", "node_id", "boot_id", "certificate_sha256")
        binding = dict(zip(names, (nonce, *own), strict=True)) | other
        return ChallengeContext(**binding)  # type: ignore[arg-type]  # Each is of its own kind.

    prover.ProverSession._context = context  # type: ignore[method-assign, assignment]  # That is the cheat.


def answer_with(answer: Answer) -> None:
    prover.ProverSession.replies = answer  # type: ignore[method-assign, assignment]  # That is the cheat.


def forget_blocks() -> None:
    """Compute every second block, and keep nothing of it."""
    forgetful = ForgetfulArithmetic(range(0, 1 << 20, 2))
    prover.NumpyArithmetic = lambda: forgetful  # type: ignore[attr-defined, assignment]  # That is the cheat.


class Recomputed(list[Residues]):
    """Blocks of which none is in memory: each is computed again whenever the walk comes to it."""

    def __init__(self, session: MemoryProver[Residues]) -> None:
        self._session = session
        self._seed = session._size.seed(session._context)
        n = session._size.columns
        self._right = session._arithmetic.expand(key_from(self._seed, "right"), 0, n, n)

    def __getitem__(self, block: int) -> Residues:  # type: ignore[override]  # Nobody asks for slices.
        n, arithmetic = self._session._size.columns, self._session._arithmetic
        left = arithmetic.expand(key_from(self._seed, "left"), block * n, n, n)
        return arithmetic.cube(arithmetic.multiply(left, self._right))


def compute_blocks_again() -> None:
    honest = MemoryProver.fill

    def fill(self: MemoryProver[Residues]) -> bytes:
        root = honest(self)
        self._blocks = Recomputed(self)
        return root

    MemoryProver.fill = fill  # type: ignore[method-assign, assignment]  # That is the cheat.


def take(device: Path) -> None:
    """Compute as on a card that takes CARD_S for each question, and that may be asked under several names."""

    def answer(session: Session, question: pb.ChallengeQuestion) -> Iterator[pb.ChallengeReply]:
        if question.WhichOneof("question") == "compute_challenge":
            with device.open("w") as card:
                fcntl.flock(card, fcntl.LOCK_EX)
                time.sleep(CARD_S)
        yield from HONEST(session, question)

    answer_with(answer)


CHEATS: Final[dict[str, Callable[[], None]]] = {
    "replay": lambda: answer_with(replay),
    "other-node": lambda: bound_to(node_id="another node"),
    "precomputed": lambda: bound_to(nonce=b"a nonce that was chosen before"),
    "other-boot": lambda: bound_to(boot_id="an earlier boot"),
    "other-certificate": lambda: bound_to(certificate_sha256=bytes(32)),
    "zeros": lambda: answer_with(made_up(bytes, of="compute")),
    "constant": lambda: answer_with(made_up(lambda size: b"\x07" * size, of="compute")),
    "empty": lambda: answer_with(made_up(lambda _: b"", of="compute")),
    "memory-zeros": lambda: answer_with(made_up(bytes, of="memory")),
    "memory-constant": lambda: answer_with(made_up(lambda size: b"\x07" * size, of="memory")),
    "memory-empty": lambda: answer_with(made_up(lambda _: b"", of="memory")),
    "memory-not-there": forget_blocks,
    "memory-recomputed": compute_blocks_again,
    "shared-card": lambda: take(ANSWERS.with_name("the-card")),
    "own-card": lambda: take(ANSWERS.with_suffix(".card")),
}

if __name__ == "__main__":
    if CHEAT.endswith("-unbound"):
        leave_out_binding()
    CHEATS[CHEAT.removesuffix("-unbound")]()
    prover.main()
