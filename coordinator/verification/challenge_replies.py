"""A prover's replies, put together from the parts in which they travel."""

from collections.abc import AsyncIterator
from typing import Final

from google.protobuf.message import DecodeError

from coordinator.errors import Reason, SlackwaterError
from protos.slackwater.node.v1 import challenge_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire

# A reply of a card is 8 MiB and a Merkle proof.
REPLY_BYTES_MAX: Final = 9 << 20
# Parts of a reply have 1 MiB; a hundred of nearly nothing are no reply.
REPLY_PARTS_MAX: Final = 100

Parts = AsyncIterator[wire.AnswerChallengeRequest]


async def replies_in(parts: Parts) -> AsyncIterator[tuple[str, challenge_pb2.ChallengeReply]]:
    """Put replies together. Raises SlackwaterError: PROTOCOL_VIOLATION for one that is too long, or none."""
    whole, count = bytearray(), 0
    async for part in parts:
        whole += part.reply_part
        count += 1
        if len(whole) > REPLY_BYTES_MAX or count > REPLY_PARTS_MAX:
            raise SlackwaterError(
                Reason.PROTOCOL_VIOLATION, f"a reply has more than {REPLY_BYTES_MAX} bytes or {REPLY_PARTS_MAX} parts"
            )
        if part.last:
            try:
                reply = challenge_pb2.ChallengeReply.FromString(bytes(whole))
            except DecodeError as error:
                raise SlackwaterError(Reason.PROTOCOL_VIOLATION, "the parts are no reply") from error
            yield part.challenge_id, reply
            whole.clear()
            count = 0
