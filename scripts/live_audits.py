"""Honest engines that audit each other: a real network in which every answer is scored by a node of another owner.

vLLM, the torch engine in float32 and the torch engine in bf16 serve the same model, each in an agent of an owner of its
own; readers ask short questions at different temperatures, and now and then an agent is killed in mid-answer, so that
another one goes on. What the coordinator made of it is read from its database. Whatever it finds against anybody is a
false alarm.
"""

import asyncio
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from audited_network import MODEL, VLLM, AuditedNetwork, Workshop
from child_process import ChildFailed
from network_settings import NetworkError
from slackwater import AsyncClient, AttemptStarted, Delta, SlackwaterError

from coordinator.ledger.entries import VERIFICATION_TENANT

# None of them is among the prompts of the calibration.
PROMPTS = (
    "Write a short story about a lighthouse keeper and the tide.",
    "How does a sewing machine make a stitch?",
    "Write a shell script that renames all .jpeg files in a folder to .jpg.",
    "Name five vegetables that can be sown in March, with a sentence about each.",
    "Why is the sea salty, and rivers are not?",
    "Write a letter to a friend about moving to a small island.",
    "What is 17 times 24? Explain how to do it in your head.",
    "Describe the inside of an old watchmaker's shop.",
    "Explain the offside rule in football.",
    "Write a haiku about fog, and say what a haiku is.",
    "How can I tell whether an egg is fresh?",
    "Give the plot of an opera that does not exist.",
    "What does a compiler do, step by step?",
)
# Temperature and top-p: greedy, as the model is, and as many chats are set.
DECODINGS = ((0.0, 1.0), (1.0, 1.0), (0.7, 0.9))
TOKENS_MIN, TOKENS_MAX = 32, 64
READERS = 6
# Answers that wait to be audited before readers pause, so that what a verdict takes is not what a queue takes.
BACKLOG_MAX = 12
# Into an answer, so that both of its attempts have something to audit.
KILL_AFTER_TOKENS = 8
LOOK_S = 1.0
SAY_S = 10.0
# Canaries first, which make each engine a verifier of the others.
PROVEN_WITHIN_S = 900.0
# A score task has two minutes.
DRAINED_WITHIN_S = 180.0
TROUBLE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """Args: `engines` are programs of audited_network.Workshop; the first is never killed."""

    engines: tuple[str, ...]
    audits: int
    kills: int


FULL = Size(engines=("vllm", "honest", "bf16"), audits=320, kills=8)
QUICK = Size(engines=("honest", "bf16"), audits=20, kills=1)
NAMES = {"vllm": "vLLM", "honest": "torch float32", "bf16": "torch bf16"}

_ANSWERED = f"""
    SELECT t.task_id || '.' || a.attempt, a.node_id, a.first_index, a.delivered_tokens, t.ended_at_ms,
           a.ended_at_ms - a.started_at_ms
    FROM attempts a JOIN tasks t ON t.task_id = a.task_id
    WHERE t.tenant_id != '{VERIFICATION_TENANT}' AND a.delivered_tokens > 0
"""
_SCORED = f"""
    SELECT t.prompt_tokens, a.ended_at_ms - a.started_at_ms
    FROM attempts a JOIN tasks t ON t.task_id = a.task_id
    WHERE t.tenant_id = '{VERIFICATION_TENANT}' AND t.completion_tokens = 0 AND a.outcome = 'finished'
"""
_AUDITED = "SELECT audit_id, node_id, verifier, kind, tokens, log_evidence, hard, not_measured, at_ms FROM audits"


@dataclass(frozen=True)
class Answered:
    """An attempt of a client's task."""

    audit_id: str
    node_id: str
    first_index: int
    tokens: int
    task_ended_at_ms: int
    took_ms: int


@dataclass(frozen=True)
class Audited:
    audit_id: str
    node_id: str
    verifier: str
    kind: str
    tokens: int
    log_evidence: float
    hard: str | None
    not_measured: str | None
    at_ms: int


class LiveAudits:
    """The load on a network, and what the coordinator has on record of it."""

    def __init__(self, network: AuditedNetwork, size: Size) -> None:
        self._network = network
        self._size = size
        self._next = 0
        self._enough = False
        self._killing: asyncio.Task[None] | None = None
        self._all_ready = False
        self.answered: list[Answered] = []
        self.audited: list[Audited] = []
        self.decoding_of: dict[str, tuple[float, float]] = {}
        self.failed: Counter[str] = Counter()
        self.kills = 0

    @property
    def rescored(self) -> list[Audited]:
        return [one for one in self.audited if one.kind == "rescore"]

    @property
    def measured(self) -> list[Audited]:
        return [one for one in self.rescored if one.not_measured is None]

    @property
    def backlog(self) -> int:
        return len(self.answered) - len(self.rescored)

    async def run(self) -> None:
        """Ask until enough audits are measured, and wait for those that are under way."""
        network = self._network
        async with network.client() as client, network.admin() as admin, asyncio.TaskGroup() as group:
            looking = group.create_task(self._look(admin))
            await asyncio.wait([group.create_task(self._read(client, group)) for _ in range(READERS)])
            if self._killing is not None:
                await self._killing
            await self._network.until(self._drained(time.monotonic() + DRAINED_WITHIN_S), 2 * DRAINED_WITHIN_S)
            looking.cancel()
        await self._refresh()

    def _drained(self, end_s: float) -> Callable[[], bool]:
        return lambda: self.backlog == 0 or time.monotonic() > end_s

    async def _read(self, client: AsyncClient, group: asyncio.TaskGroup) -> None:
        while not self._enough:
            if self.backlog > BACKLOG_MAX:
                await asyncio.sleep(LOOK_S)
                continue
            number, self._next = self._next, self._next + 1
            try:
                await self._ask(client, group, number)
            except SlackwaterError as error:
                self.failed[type(error).__name__] += 1
                # Nobody serves the model for a moment after a kill; asking again at once would not help.
                await asyncio.sleep(LOOK_S)

    async def _ask(self, client: AsyncClient, group: asyncio.TaskGroup, number: int) -> None:
        temperature, top_p = DECODINGS[number % len(DECODINGS)]
        answer = client.chat(
            f"{PROMPTS[number % len(PROMPTS)]} ({number})",
            model=MODEL,
            temperature=temperature,
            top_p=top_p,
            seed=number,
            max_tokens=TOKENS_MIN + 7 * number % (TOKENS_MAX - TOKENS_MIN + 1),
        )
        agent, tokens = 0, 0
        async for event in answer:
            if isinstance(event, AttemptStarted):
                agent, tokens = self._network.index_of(event.node_id), 0
            elif isinstance(event, Delta):
                tokens += len(event.token_ids)
                if self._is_to_die(agent, tokens):
                    self.kills += 1
                    self._killing = group.create_task(self._kill(agent))
        assert answer.task_id is not None, "an answer that ended was accepted"
        self.decoding_of[answer.task_id] = (temperature, top_p)

    def _is_to_die(self, agent: int, tokens: int) -> bool:
        """Whether an agent is to be killed in this answer: one after the other, spread over the run.

        The first one stays: there is always somebody who goes on, and vLLM takes a minute to come back.
        """
        # Of three, two have to be left: one that answers, and one that judges it.
        if not self._all_ready or (self._killing is not None and not self._killing.done()):
            return False
        due = self.kills < len(self.measured) * (self._size.kills + 1) // self._size.audits
        return (
            due
            and self.kills < self._size.kills
            and tokens >= KILL_AFTER_TOKENS
            and agent == 1 + self.kills % (len(self._size.engines) - 1)
        )

    async def _kill(self, agent: int) -> None:
        await self._network.kill_agent(agent)
        await self._network.restart_agent(agent)

    async def _look(self, admin: AsyncClient) -> None:
        """Read the coordinator's records again and again, and tell how far it is."""
        said_s, progress_s = time.monotonic(), time.monotonic()
        while True:
            before = len(self.rescored)
            await self._refresh()
            engines = [engine.status for node in await admin.nodes() for engine in node.engines]
            self._all_ready = engines.count("ready") == len(self._size.engines)
            now_s = time.monotonic()
            if len(self.rescored) > before:
                progress_s = now_s
            if now_s - progress_s > TROUBLE_S:
                raise NetworkError(f"no audit for {TROUBLE_S:.0f} s\n{self._network.story()}")
            self._enough = len(self.measured) >= self._size.audits
            if now_s - said_s >= SAY_S:
                said_s = now_s
                say(f"{len(self.measured)} audits of {len(self.answered)} attempts, {self.kills} agents killed")
            await asyncio.sleep(LOOK_S)

    async def _refresh(self) -> None:
        answered = await asyncio.to_thread(self._network.query, _ANSWERED)
        audited = await asyncio.to_thread(self._network.query, _AUDITED)
        self.answered = [Answered(*row) for row in answered]
        self.audited = [Audited(*row) for row in audited]


async def run(*, quick: bool) -> dict[str, Any]:
    """Return the figures of the live audits.

    Raises:
        NetworkError: the network does not come up, or its engines are not found honest enough to audit.
    """
    size = QUICK if quick else FULL
    if "vllm" in size.engines and not VLLM.exists():
        raise NetworkError(f"{VLLM} is missing: run `make setup-vllm`")
    with tempfile.TemporaryDirectory(prefix="sw-audits-") as folder:
        engines = await asyncio.to_thread(Workshop(Path(folder)).engines, *size.engines)
        async with AuditedNetwork(replace(engines, audit_permille=1000), say=say) as network:
            say("canaries first: nobody judges others before it is known")
            started_s = time.monotonic()
            everyone = range(len(size.engines))
            try:
                await network.until(lambda: all(network.state(index) == "ok" for index in everyone), PROVEN_WITHIN_S)
            except AssertionError as error:
                raise NetworkError(f"not every engine was found honest by canaries:\n{error}") from error
            say(f"all are known after {time.monotonic() - started_s:.0f} s")
            audits = LiveAudits(network, size)
            try:
                await audits.run()
            except* (ChildFailed, NetworkError) as errors:
                raise NetworkError("; ".join(map(str, errors.exceptions))) from errors
            return await asyncio.to_thread(figures, network, size, audits)


def figures(network: AuditedNetwork, size: Size, audits: LiveAudits) -> dict[str, Any]:
    names = {network.ready.agents[index].node_id: NAMES[engine] for index, engine in enumerate(size.engines)}
    measured = audits.measured
    attempts = {one.audit_id: one for one in audits.answered}
    resumed = [one for one in measured if attempts[one.audit_id].first_index > 0]
    states = [verdict for index in range(len(names)) for verdict in network.verdicts(index)]
    scored = network.query(_SCORED)
    delays_s = sorted((one.at_ms - attempts[one.audit_id].task_ended_at_ms) / 1000 for one in measured)
    evidence = sorted(one.log_evidence for one in measured)
    tokens = sum(one.tokens for one in measured)
    canaries = [one for one in audits.audited if one.kind == "canary" and one.not_measured is None]
    return {
        "live_audits": len(measured),
        "live_audited_tokens": tokens,
        "live_quarantines": sum(one.state in ("quarantined", "banned") and not one.shadow for one in states),
        "live_watched": sum(one.state == "watch" for one in states),
        "live_hard_failures": sum(one.hard is not None for one in audits.audited),
        "live_disputes": sum(one.kind == "peer" for one in audits.audited),
        "live_attempts": len(audits.answered),
        "live_not_measured": dict(Counter(one.not_measured for one in audits.rescored if one.not_measured)),
        "live_not_told": audits.backlog,
        "live_resumed_audits": len(resumed),
        "live_agents_killed": audits.kills,
        "live_failed_answers": dict(audits.failed),
        "live_canaries": len(canaries),
        "live_audits_of_by": dict(Counter(f"{names[one.node_id]} by {names[one.verifier]}" for one in measured)),
        "live_audits_by_decoding": dict(Counter(decoding(audits, one) for one in measured)),
        "live_evidence_p50": quantile(evidence, 0.5),
        "live_evidence_p99": quantile(evidence, 0.99),
        "live_evidence_max": quantile(evidence, 1.0),
        "live_verdict_s_p50": quantile(delays_s, 0.5),
        "live_verdict_s_p99": quantile(delays_s, 0.99),
        # Of a slot of the verifier, other work beside it; and the same for those who answered.
        "live_verifier_ms_per_audited_token": round(sum(row[1] for row in scored) / tokens, 1),
        "live_answer_ms_per_token": round(
            sum(one.took_ms for one in attempts.values()) / sum(one.tokens for one in attempts.values()), 1
        ),
        "live_scored_tokens": sum(row[0] for row in scored),
    }


def decoding(audits: LiveAudits, audit: Audited) -> str:
    known = audits.decoding_of.get(audit.audit_id.rpartition(".")[0])
    return "failed" if known is None else "greedy" if known[0] == 0 else f"T {known[0]:g}, top-p {known[1]:g}"


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that `share` of an ordered row is at or below."""
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 2) if ordered else 0.0


def say(message: str) -> None:
    print(f"[audits] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(quick="--quick" in sys.argv)), indent=2))
