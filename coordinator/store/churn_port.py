"""What the churn model keeps in the database: one row a node."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from inference.task import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnRow:
    """Lent hours and losses of a node by hour of the week, as of a time: 84 little-endian float32 each."""

    node_id: NodeId
    lent_h: bytes
    lost: bytes
    as_of_ms: int


class ChurnStore(Protocol):
    def put_churn_histories(self, rows: Sequence[ChurnRow]) -> None:
        """Write histories in one transaction, in place of what was written before."""
        ...

    def churn_histories(self) -> list[ChurnRow]: ...
