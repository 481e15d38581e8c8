"""Asks the coordinator for the newest checkpoint of its ledger: after each connect, and every hour.

`agent.ledger.watch` judges it; here are the call, the file, and what the rest of the agent is told.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from agent.clock import monotonic_s, until_next_s
from agent.ledger.file import LEDGER_FILE, load_ledger_record, store_ledger_record
from agent.ledger.watch import LedgerWatch
from protos.checkpoint import log_origin
from protos.slackwater.node.v1 import node_service_pb2, node_service_pb2_grpc

# A rewritten log is evidence for good; how soon it is seen only bounds how long a node works for such a coordinator.
CHECK_PERIOD_S = 3600.0
# How soon a new connection is noticed. A look is a comparison.
LOOK_PERIOD_S = 2.0
# A proof is a few dozen hashes; an answer that takes longer will not come.
CALL_TIMEOUT_S = 10.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStanding:
    """What an owner is told of the coordinator's ledger; `refused` and `detail` are empty where it only grew."""

    entries_seen: int
    refused: str
    detail: str
    # The file that holds the checkpoint kept and the one refused.
    evidence: str


class LedgerKeeper:
    """Watches one coordinator's ledger for a running agent.

    Args:
        channel: the connection to the coordinator's node port, where there is one.
        coordinator_keys: raw keys that may sign checkpoints, of the moment.
        on_judged: told after each check, and at the start if the last run saw a rewritten log, whether new work must
            be refused.
    """

    def __init__(
        self,
        cluster_id: str,
        state_dir: Path,
        *,
        channel: Callable[[], grpc.aio.Channel | None],
        coordinator_keys: Callable[[], tuple[bytes, ...]],
        on_judged: Callable[[bool], None],
    ) -> None:
        self._state_dir = state_dir
        self._watch = LedgerWatch(log_origin(cluster_id), load_ledger_record(state_dir))
        self._channel = channel
        self._coordinator_keys = coordinator_keys
        self._on_judged = on_judged

    def standing(self) -> LedgerStanding:
        rewritten = self._watch.rewritten
        return LedgerStanding(
            entries_seen=self._watch.size,
            refused="" if rewritten is None else rewritten.reason.value,
            detail="" if rewritten is None else rewritten.detail,
            evidence=str(self._state_dir / LEDGER_FILE),
        )

    async def run(self) -> None:
        if self._watch.rewritten is not None:
            self._on_judged(True)
        checked: grpc.aio.Channel | None = None
        checked_at = monotonic_s()
        while True:
            channel = self._channel()
            if channel is not None and (channel is not checked or monotonic_s() - checked_at >= CHECK_PERIOD_S):
                checked, checked_at = channel, monotonic_s()
                await self.check(channel)
            await asyncio.sleep(until_next_s(LOOK_PERIOD_S))

    async def check(self, channel: grpc.aio.Channel) -> None:
        """Ask once, judge, remember, and tell."""
        request = node_service_pb2.GetCheckpointRequest(old_size=self._watch.size)
        try:
            answer = await node_service_pb2_grpc.NodeServiceStub(channel).GetCheckpoint(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # UNIMPLEMENTED: a coordinator of an earlier release, which has no such call.
            log.warning(
                "the coordinator shows no checkpoint of its ledger",
                reason=f"{error.code().name}: {error.details()}",
                entries_seen=self._watch.size,
            )
            return
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            # The connection ended, and its channel was closed, at this moment; the next one is asked again.
            return
        before = self._watch.record
        found = self._watch.accept(
            answer.update.checkpoint, tuple(answer.update.consistency_proof), self._coordinator_keys()
        )
        if found is not None:
            log.error(
                "the coordinator's ledger was rewritten; no new work is taken",
                reason=found.reason.value,
                detail=found.detail,
                entries_seen=self._watch.size,
            )
        if self._watch.record != before:
            await self._remember()
        self._on_judged(self._watch.rewritten is not None)

    async def _remember(self) -> None:
        try:
            await asyncio.to_thread(store_ledger_record, self._watch.record, self._state_dir)
        except OSError as error:
            # This run remembers; the next one compares with an older checkpoint, which is as good.
            log.error("cannot store the checkpoint of the ledger", reason=str(error))
