"""The prover as a process of its own: `python -m inference.challenge.prover`, questions in, replies out.

It runs in an engine's environment where there is a card (torch), in the
daemon's where there is none (numpy), and ends when its input does. Frames on
standard input and output are a length (4 bytes, big-endian) and a protobuf
message: ChallengeQuestion in, ChallengeReply out. The first reply, before any
question, says that the prover is ready. Errors go to standard error.

The context is given by the agent, as arguments: none of it is secret.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import BinaryIO, Final, Generic

from inference.challenge import wire
from inference.challenge.arithmetic import Arithmetic, Matrix, NumpyArithmetic
from inference.challenge.compute import ComputeProver
from inference.challenge.context import ChallengeContext
from inference.challenge.framing import LENGTH_BYTES
from inference.challenge.memory import MemoryProver
from protos.slackwater.node.v1 import challenge_pb2 as pb

# Questions are some numbers; the longest lists a few hundred chains or steps.
QUESTION_BYTES_MAX: Final = 1 << 16


class ProverSession(Generic[Matrix]):
    """Answers one challenge at a time: the next one drops what the last one held."""

    def __init__(self, node_id: str, boot_id: str, certificate_sha256: bytes, arithmetic: Arithmetic[Matrix]) -> None:
        self._node_id = node_id
        self._boot_id = boot_id
        self._certificate_sha256 = certificate_sha256
        self._arithmetic = arithmetic
        self._challenge_id = ""
        self._compute: ComputeProver[Matrix] | None = None
        self._memory: MemoryProver[Matrix] | None = None

    def replies(self, question: pb.ChallengeQuestion) -> Iterator[pb.ChallengeReply]:
        """Do what is asked and yield the replies; a refusal where it cannot be done."""
        kind = question.WhichOneof("question")
        challenge_id = str(getattr(question, kind).challenge_id) if kind else ""
        try:
            yield from self._answered(kind, challenge_id, question)
        # torch says with a RuntimeError that a card's memory is full.
        except (ValueError, MemoryError, RuntimeError) as error:
            self._compute = self._memory = None
            refusal = pb.ChallengeRefusal(challenge_id=challenge_id, reason=str(error) or type(error).__name__)
            yield pb.ChallengeReply(challenge_refusal=refusal)

    def _answered(
        self, kind: str | None, challenge_id: str, question: pb.ChallengeQuestion
    ) -> Iterator[pb.ChallengeReply]:
        match kind:
            case "compute_challenge":
                size = wire.compute_size(question.compute_challenge)
                self._begin(challenge_id)
                context = self._context(question.compute_challenge.nonce)
                self._compute = ComputeProver(context, size, self._arithmetic)
                commitment = pb.ComputeCommitment(challenge_id=challenge_id, root=self._compute.commit())
                yield pb.ChallengeReply(compute_commitment=commitment)
            case "memory_challenge":
                size_of_memory = wire.memory_size(question.memory_challenge)
                self._begin(challenge_id)
                context = self._context(question.memory_challenge.nonce)
                self._memory = MemoryProver(context, size_of_memory, self._arithmetic)
                filled = pb.MemoryCommitment(challenge_id=challenge_id, fill_root=self._memory.fill())
                yield pb.ChallengeReply(memory_commitment=filled)
            case "compute_draw" if self._compute and challenge_id == self._challenge_id:
                for chain in question.compute_draw.chains:
                    for answer in wire.compute_answers(challenge_id, self._compute.open([chain])):
                        yield pb.ChallengeReply(compute_answer=answer)
            case "memory_walk" if self._memory and challenge_id == self._challenge_id:
                root = self._memory.walk(question.memory_walk.walk_nonce)
                walked = pb.MemoryWalkCommitment(challenge_id=challenge_id, walk_root=root)
                yield pb.ChallengeReply(memory_walk_commitment=walked)
            case "memory_draw" if self._memory and challenge_id == self._challenge_id:
                draw = question.memory_draw
                opening = wire.memory_opening(challenge_id, *self._memory.open(draw.steps, draw.blocks))
                yield pb.ChallengeReply(memory_opening=opening)
            case _:
                raise ValueError(f"{kind or 'an empty question'} has no challenge {challenge_id!r} before it here")

    def _begin(self, challenge_id: str) -> None:
        # Before the next fill is made: two of them would not fit.
        self._compute = self._memory = None
        self._challenge_id = challenge_id

    def _context(self, nonce: bytes) -> ChallengeContext:
        return ChallengeContext(nonce, self._node_id, self._boot_id, self._certificate_sha256)


def read_question(stream: BinaryIO) -> pb.ChallengeQuestion | None:
    """Return the next question, or None at the end of the input.

    Raises:
        ValueError: the frame is too long, or cut off.
    """
    head = stream.read(LENGTH_BYTES)
    if not head:
        return None
    length = int.from_bytes(head, "big")
    if len(head) < LENGTH_BYTES or length > QUESTION_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes: at most {QUESTION_BYTES_MAX}, behind {LENGTH_BYTES} of length")
    body = stream.read(length)
    if len(body) < length:
        raise ValueError(f"the input ended after {len(body)} of a frame's {length} bytes")
    return pb.ChallengeQuestion.FromString(body)


def write_reply(stream: BinaryIO, reply: pb.ChallengeReply) -> None:
    body = reply.SerializeToString()
    stream.write(len(body).to_bytes(LENGTH_BYTES, "big"))
    stream.write(body)
    stream.flush()


def serve(session: ProverSession[Matrix], ready: pb.ProverReady, questions: BinaryIO, replies: BinaryIO) -> None:
    """Say that the prover is ready, and answer questions until there are no more.

    Raises:
        ValueError: the input is no sequence of frames.
    """
    write_reply(replies, pb.ChallengeReply(prover_ready=ready))
    while (question := read_question(questions)) is not None:
        for reply in session.replies(question):
            write_reply(replies, reply)


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer capability challenges on standard input.")
    parser.add_argument("--device", required=True, help='"numpy", or a device of torch: "cpu", "cuda:0"')
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--boot-id", required=True)
    parser.add_argument("--certificate-sha256", required=True, type=bytes.fromhex, help="hexadecimal")
    parser.add_argument("--memory-bytes", type=int, default=0, help="what may be filled")
    options = parser.parse_args()
    binding = (options.node_id, options.boot_id, options.certificate_sha256)
    streams = (sys.stdin.buffer, sys.stdout.buffer)
    if options.device == "numpy":
        ready = pb.ProverReady(arithmetic="numpy", memory_bytes=options.memory_bytes)
        serve(ProverSession(*binding, NumpyArithmetic()), ready, *streams)
        return
    # Only here, since it imports torch.
    from inference.challenge.torch_arithmetic import fastest

    arithmetic = fastest(options.device)
    name = "torch int8" if arithmetic.integer else "torch float32"
    ready = pb.ProverReady(arithmetic=name, memory_bytes=options.memory_bytes)
    serve(ProverSession(*binding, arithmetic), ready, *streams)


if __name__ == "__main__":
    main()
