"""What a node says against itself: every attempt is looked at, and nothing needs to be computed for it.

A statement that is not about its order, or frames that do not fit each other,
cannot come from an honest agent, whatever its engine computes. It is a hard
failure of the node as a whole; two of them quarantine it.
"""

from collections.abc import Callable

import structlog

from coordinator.clock import Clock
from coordinator.errors import SlackwaterError
from coordinator.ledger.settlement import UNPAID_OUTCOMES
from coordinator.scheduler.driver import Records
from coordinator.store.port import AttemptRow, LateStatementRow, TaskRow
from coordinator.verification.events import NODE_WIDE, AuditKind, AuditMeasured
from coordinator.verification.service import Verification
from inference.task import NodeId, OwnerId

log = structlog.get_logger()


class WatchedRecords:
    """The driver's records, with an eye on contradictions.

    Args:
        owner_of: whose a node is, as enrolled.
    """

    def __init__(
        self, records: Records, verification: Verification, clock: Clock, owner_of: Callable[[NodeId], OwnerId]
    ) -> None:
        self._records = records
        self._verification = verification
        self._clock = clock
        self._owner_of = owner_of

    def add_attempt(self, row: AttemptRow) -> None:
        self._records.add_attempt(row)
        if row.outcome in UNPAID_OUTCOMES:
            self._tell(row)

    def add_late_statement(self, row: LateStatementRow) -> None:
        self._records.add_late_statement(row)

    def add_task(self, row: TaskRow) -> None:
        self._records.add_task(row)

    def _tell(self, row: AttemptRow) -> None:
        contradiction = AuditMeasured(
            node_id=row.node_id,
            owner_id=self._owner_of(row.node_id),
            manifest_digest=NODE_WIDE,
            audit_id=f"{row.task_id}.{row.attempt}.structure",
            kind=AuditKind.STRUCTURE,
            tokens=row.delivered_tokens,
            log_evidence=0.0,
            hard=row.outcome,
            at_ms=self._clock.now_ms(),
        )
        try:
            self._verification.tell(contradiction)
        except SlackwaterError as error:
            # It is in the record of the attempt all the same.
            log.warning("audit_lost", node=row.node_id, why=error.message)
