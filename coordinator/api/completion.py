"""Wire and domain forms of what slackwater.common.v1 says of a completion: one table or function per type."""

from collections.abc import Iterable, Sequence
from typing import overload

from inference.task import FinishReason, PositionLogprobs, PrivacyClass, ServiceClass, TaskKind, TokenLogprob
from protos.slackwater.common.v1 import completion_pb2

KIND_TO_WIRE = {
    TaskKind.GENERATE: completion_pb2.TASK_KIND_GENERATE,
    TaskKind.SCORE: completion_pb2.TASK_KIND_SCORE,
    TaskKind.EMBED: completion_pb2.TASK_KIND_EMBED,
}
SERVICE_CLASS_TO_WIRE = {
    ServiceClass.INTERACTIVE: completion_pb2.SERVICE_CLASS_INTERACTIVE,
    ServiceClass.STANDARD: completion_pb2.SERVICE_CLASS_STANDARD,
    ServiceClass.BATCH: completion_pb2.SERVICE_CLASS_BATCH,
}
PRIVACY_CLASS_TO_WIRE = {
    PrivacyClass.PUBLIC: completion_pb2.PRIVACY_CLASS_PUBLIC,
    PrivacyClass.TRUSTED_OWNERS: completion_pb2.PRIVACY_CLASS_TRUSTED_OWNERS,
    PrivacyClass.OWN_NODES: completion_pb2.PRIVACY_CLASS_OWN_NODES,
}
FINISH_REASON_TO_WIRE = {
    FinishReason.STOP: completion_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: completion_pb2.FINISH_REASON_LENGTH,
}
KIND_FROM_WIRE = {wire: kind for kind, wire in KIND_TO_WIRE.items()}
SERVICE_CLASS_FROM_WIRE = {wire: service_class for service_class, wire in SERVICE_CLASS_TO_WIRE.items()}
PRIVACY_CLASS_FROM_WIRE = {wire: privacy_class for privacy_class, wire in PRIVACY_CLASS_TO_WIRE.items()}
FINISH_REASON_FROM_WIRE = {wire: reason for reason, wire in FINISH_REASON_TO_WIRE.items()}


def logprobs_from_wire(positions: Iterable[completion_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(_from_wire(position.chosen), tuple(_from_wire(top) for top in position.top))
        for position in positions
    )


def chosen_from_wire(positions: Iterable[completion_pb2.PositionLogprobs]) -> list[PositionLogprobs]:
    """Return positions without their rivals, which take most of the time."""
    return [PositionLogprobs(_from_wire(position.chosen)) for position in positions]


class WireLogprobs(Sequence[PositionLogprobs]):
    """Positions as they came, each made an object where it is read.

    A score names 64 rivals of each id. All of them at once take 0.1 s for a thousand ids, which whoever judges them has
    and the event loop that receives them has not.
    """

    def __init__(self, positions: Sequence[completion_pb2.PositionLogprobs]) -> None:
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PositionLogprobs, ...]: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | tuple[PositionLogprobs, ...]:
        if isinstance(index, slice):
            return logprobs_from_wire(self._positions[index])
        return logprobs_from_wire((self._positions[index],))[0]


def logprobs_to_wire(positions: Iterable[PositionLogprobs]) -> list[completion_pb2.PositionLogprobs]:
    return [
        completion_pb2.PositionLogprobs(chosen=_to_wire(position.chosen), top=[_to_wire(top) for top in position.top])
        for position in positions
    ]


def _from_wire(logprob: completion_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(logprob.token_id, logprob.logprob, logprob.rank)


def _to_wire(logprob: TokenLogprob) -> completion_pb2.TokenLogprob:
    return completion_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank)
