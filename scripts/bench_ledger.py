"""Benchmark `ledger`: tasks reserved for and settled through the coordinator's own ledger, into SQLite on this disk.

Each task is three entries (reserve, post, earn) with six postings, written in group commits with their hashes in the
log, as when a coordinator runs. The clock stops when all of them are on the disk. A posting is one amount on one
account. What the event loop spends on a task is measured apart, without the writing.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_numbers import percentile
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.clock import SystemClock
from coordinator.ledger.log import TransparencyLog
from coordinator.ledger.prices import Terms
from coordinator.ledger.service import GROUP_COMMIT_S, Ledger, SettlingRecords
from coordinator.recorder import Recorder
from coordinator.scheduler.testing import task_spec
from coordinator.store.port import AttemptRow, TaskRow
from coordinator.store.sql import SqlStore
from inference.task import NodeId, OwnerId, TaskSpec

TASKS = 20_000
ENTRIES_PER_TASK = 3
QUICK_TASKS = 1_000
# Tasks between two looks at the event loop: some that end in the same tick.
BURST = 50
NODES = 20
# Reservations that are waited for, one at a time: what waiting before dispatch would cost.
COMMITS = 200
PAGE_ENTRIES = 10_000


async def run(*, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sw-bench-ledger-") as directory:
        store = SqlStore(f"sqlite:///{Path(directory) / 'coordinator.db'}")
        try:
            return await _measure(store, QUICK_TASKS if quick else TASKS)
        finally:
            store.close()


async def _measure(store: SqlStore, tasks: int) -> dict[str, Any]:
    log = TransparencyLog("bench", Ed25519PrivateKey.generate(), store)
    ledger = Ledger(store, log, SystemClock(), Terms(), lambda _: OwnerId("owner"))
    records = SettlingRecords(Recorder(store), ledger)
    loop_us: list[float] = []
    begun = time.perf_counter()
    writing = asyncio.create_task(ledger.run())
    for number in range(tasks):
        spec = task_spec(f"task-{number}")
        started = time.perf_counter()
        ledger.reserve(spec)
        records.add_attempt(_attempt(spec, NodeId(f"node-{number % NODES}")))
        records.add_task(_task(spec))
        loop_us.append((time.perf_counter() - started) * 1_000_000)
        if number % BURST == 0:
            await asyncio.sleep(0)
    await ledger.flush()
    wall_s = time.perf_counter() - begun
    loop_us.sort()
    durable_ms = sorted([await _durable_ms(ledger, number) for number in range(COMMITS)])
    writing.cancel()
    await asyncio.wait([writing])
    entries = tasks * ENTRIES_PER_TASK
    postings, balanced = _postings(store, entries)
    print(f"{tasks} tasks, {postings} postings in {wall_s:.1f} s", file=sys.stderr)
    return {
        "ledger_postings_per_s": round(postings / wall_s),
        "ledger_entries_per_s": round(entries / wall_s),
        "tasks": tasks,
        "loop_us_per_task_p50": percentile(loop_us, 0.5),
        "loop_us_per_task_p99": percentile(loop_us, 0.99),
        "until_durable_ms_p50": percentile(durable_ms, 0.5),
        "until_durable_ms_p99": percentile(durable_ms, 0.99),
        "balanced": balanced,
    }


async def _durable_ms(ledger: Ledger, number: int) -> float:
    started = time.perf_counter()
    ledger.reserve(task_spec(f"waited-{number}"))
    await asyncio.sleep(GROUP_COMMIT_S)
    await ledger.flush()
    return (time.perf_counter() - started) * 1000


def _postings(store: SqlStore, entries: int) -> tuple[int, bool]:
    """Count the postings of the journal's first entries, and say whether each entry sums to zero."""
    postings, balanced = 0, True
    for start in range(0, entries, PAGE_ENTRIES):
        for row in store.ledger_page(start, min(PAGE_ENTRIES, entries - start)):
            legs = json.loads(row.body)["legs"]
            postings += len(legs)
            balanced = balanced and sum(amount for _, amount in legs) == 0
    return postings, balanced


def _attempt(spec: TaskSpec, node_id: NodeId) -> AttemptRow:
    return AttemptRow(
        task_id=spec.task_id,
        attempt=1,
        node_id=node_id,
        lease_epoch=1,
        first_index=0,
        delivered_tokens=spec.max_tokens,
        outcome="finished",
        statement=b"signed",
        energy_mj=None,
        energy_method=None,
        started_at_ms=0,
        ended_at_ms=0,
    )


def _task(spec: TaskSpec) -> TaskRow:
    return TaskRow(
        task_id=spec.task_id,
        tenant_id=spec.tenant_id,
        manifest_digest=spec.manifest_digest,
        outcome="length",
        prompt_tokens=len(spec.prompt_ids),
        completion_tokens=spec.max_tokens,
        submitted_at_ms=0,
        ended_at_ms=0,
    )
