"""Admission and keeping of tasks: what is refused and for which parameter, and how long what is remembered."""

import asyncio
import dataclasses
import math
import threading
from array import array
from collections.abc import Sequence
from typing import cast

import pytest

from coordinator import tasks as tasks_module
from coordinator.admission import INLINE_CHARACTERS_MAX, LOGPROBS_MAX, SEED_MAX
from coordinator.answers import LiveAnswer
from coordinator.errors import Reason, SlackwaterError
from coordinator.keys import CoordinatorKeys
from coordinator.ledger.prices import Terms
from coordinator.quotes import Quotes
from coordinator.scheduler import events as e
from coordinator.scheduler.testing import DIGEST
from coordinator.scheduler.testing_driver import DriverHarness
from coordinator.stated_energy import StatedEnergy
from coordinator.store.port import AttemptRow, Store, TaskRow
from coordinator.store.verification_port import RateRow
from coordinator.tasks import RETENTION_S, LocalTasks
from coordinator.tasks_port import (
    PRICE_LIMIT_MICRO_MAX,
    TTFT_MS_MAX,
    Accepted,
    AttemptSummary,
    Decision,
    Failed,
    QuoteRequest,
    SamplingRequest,
    TaskRequest,
    WaitingSummary,
)
from coordinator.testing import FakeTokenizer
from inference.manifest import Manifest
from inference.task import ManifestDigest, NodeId, PrivacyClass, TaskId, TaskKind, TaskSpec, TenantId
from inference.text import Message, TemplateError

TENANT = TenantId("tenant")
CONTEXT_TOKENS = 100
BOOT = 7


class FakeKeys:
    """Derives a seed from a task id, as the real keys do."""

    signing_public_key = bytes(32)

    def derive_seed(self, task_id: str) -> int:
        return int(task_id[-8:], 16)


class FakeStore:
    """What the store remembers of ended tasks."""

    def __init__(self) -> None:
        self.rows: dict[str, TaskRow] = {}
        self.attempt_rows: list[AttemptRow] = []

    def find_task(self, task_id: TaskId) -> TaskRow | None:
        return self.rows.get(task_id)

    def attempts(self, task_id: TaskId) -> list[AttemptRow]:
        return self.attempt_rows


def manifest(name: str = "model", kind: TaskKind = TaskKind.GENERATE) -> Manifest:
    return Manifest(
        digest=DIGEST,
        name=name,
        revision="1",
        architecture="A",
        licence="MIT",
        dtype="float32",
        context_tokens=CONTEXT_TOKENS,
        vocabulary_size=256,
        stop_token_ids=(2,),
        files=(),
        origin="",
        kind=kind,
    )


class Bench:
    """Tasks over a real driver and scheduler, with one node that is ready."""

    def __init__(self, tokenizer: FakeTokenizer | None = None) -> None:
        self.harness = DriverHarness()
        self.store = FakeStore()
        self.reserved: list[TaskSpec] = []
        self.rates: list[RateRow] = []
        self.asked: list[tuple[ManifestDigest, int]] = []
        self.tasks = LocalTasks(
            self.harness.driver,
            cast(Store, self.store),
            cast(CoordinatorKeys, FakeKeys()),
            self.harness.clock,
            boot_number=BOOT,
            reserve=self.reserved.append,
            quotes=Quotes(self.harness.scheduler, self.harness.clock, Terms(), self, grid_grams_per_kwh=400),
            on_asked=lambda digest, tokens: self.asked.append((digest, tokens)),
        )
        for model in (manifest(), manifest("embedder", TaskKind.EMBED)):
            self.tasks.add_model(model, tokenizer or FakeTokenizer(), created_at_ms=5)
        self.node = self.harness.ready("a")

    def rates_of(self, manifest_digest: ManifestDigest) -> list[RateRow]:
        return self.rates

    def rates_on(self, node_id: NodeId, manifest_digest: ManifestDigest) -> list[RateRow]:
        return [rate for rate in self.rates if rate.node_id == node_id]

    async def submit(self, **changes: object) -> LiveAnswer:
        """Submit five ids that ask for eight, kept for a while, but for what is changed."""
        request = TaskRequest(model="model", input="hello", max_tokens=8, detach_grace_s=30.0)
        return await self.tasks.submit(TENANT, dataclasses.replace(request, **changes))  # type: ignore[arg-type]

    def spec(self, answer: LiveAnswer) -> TaskSpec:
        return self.harness.scheduler.tasks[answer.accepted.task_id].spec

    def deliver(self, answer: LiveAnswer, *ids: int) -> None:
        self.harness.frame(self.node, answer.token_count, *ids, task=answer.accepted.task_id)

    def end(self, answer: LiveAnswer) -> None:
        self.harness.driver.feed(e.TaskCancelled(answer.accepted.task_id))

    def remembers(self, answer: LiveAnswer) -> bool:
        try:
            return self.tasks.attach(TENANT, answer.accepted.task_id) is answer
        except SlackwaterError:
            return False


def measured(node: str, joules_per_token: float) -> RateRow:
    return RateRow(
        node_id=NodeId(node),
        manifest_digest=DIGEST,
        streams=1,
        engine_build="fake 1",
        tokens_per_second=50.0,
        first_token_ms=100,
        joules_per_token=joules_per_token,
        energy_method="counter",
        measured_at_ms=0,
    )


async def refused(bench: Bench, **changes: object) -> tuple[Reason, str | None]:
    """Return how a submission is refused, after which nothing is left of it."""
    with pytest.raises(SlackwaterError) as caught:
        await bench.submit(**changes)
    assert bench.harness.scheduler.tasks == {}
    return caught.value.reason, caught.value.param


# --- what is refused ---------------------------------------------------------------------------

INVALID = Reason.INVALID_ARGUMENT
HUGE = 10**400


@pytest.mark.parametrize(
    ("changes", "reason", "param"),
    [
        ({"model": "other"}, Reason.MODEL_NOT_FOUND, "model"),
        ({"kind": TaskKind.EMBED}, Reason.UNSUPPORTED, "model"),
        ({"model": "embedder"}, Reason.UNSUPPORTED, "model"),
        ({"privacy_class": PrivacyClass.OWN_NODES}, Reason.UNSUPPORTED, "privacy"),
        ({"max_ttft_ms": 0}, INVALID, "max_ttft_ms"),
        ({"max_ttft_ms": TTFT_MS_MAX + 1}, INVALID, "max_ttft_ms"),
        ({"max_price_micro": 0}, INVALID, "max_price_micro"),
        ({"max_price_micro": PRICE_LIMIT_MICRO_MAX + 1}, INVALID, "max_price_micro"),
        # Five tokens at 0.25 credits per thousand, and eight at one credit: 9,250 micro-credits.
        ({"max_price_micro": 9_249}, Reason.PRICE_EXCEEDED, "max_price_micro"),
        ({"input": ""}, INVALID, "prompt"),
        ({"input": ()}, INVALID, "prompt"),
        ({"input": (1, 2, 256)}, INVALID, "prompt[2]"),
        ({"input": (1, -1)}, INVALID, "prompt[1]"),
        ({"input": (HUGE,)}, INVALID, "prompt[0]"),
        ({"deadline_s": 0.0}, INVALID, "deadline_ms"),
        ({"deadline_s": -1.0}, INVALID, "deadline_ms"),
        ({"deadline_s": math.nan}, INVALID, "deadline_ms"),
        ({"deadline_s": math.inf}, INVALID, "deadline_ms"),
        ({"stop": ("a", "b", "c", "d", "e")}, INVALID, "stop"),
        ({"stop": ("a", "")}, INVALID, "stop[1]"),
        ({"stop": ("x" * 257,)}, INVALID, "stop[0]"),
        ({"stop": ("a", "b", "\u65e5" * 86)}, INVALID, "stop[2]"),
        ({"max_tokens": 0}, INVALID, "max_tokens"),
        ({"max_tokens": -5}, INVALID, "max_tokens"),
        ({"max_tokens": CONTEXT_TOKENS - 4}, Reason.CONTEXT_EXCEEDED, "max_tokens"),
        ({"max_tokens": HUGE}, Reason.CONTEXT_EXCEEDED, "max_tokens"),
        ({"input": "x" * CONTEXT_TOKENS}, Reason.CONTEXT_EXCEEDED, "prompt"),
        ({"input": (65,) * CONTEXT_TOKENS}, Reason.CONTEXT_EXCEEDED, "prompt"),
        ({"input": (Message("user", "x" * CONTEXT_TOKENS),)}, Reason.CONTEXT_EXCEEDED, "messages"),
        ({"input": "x" * (CONTEXT_TOKENS + 1), "kind": TaskKind.SCORE}, Reason.CONTEXT_EXCEEDED, "prompt"),
        ({"input": "x" * 50_000}, Reason.CONTEXT_EXCEEDED, "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_value_that_will_not_do_is_refused_and_named(
    changes: dict[str, object], reason: Reason, param: str
) -> None:
    """Mutations seen to fail here: the bounds of _max_tokens one off; the size of a stop string in characters."""
    assert await refused(Bench(), **changes) == (reason, param)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-0.1, 2.1)),
        ("top_p", (0.0, -0.1, 1.1)),
        ("top_k", (-1, 2**31, HUGE)),
        ("presence_penalty", (-2.1, 2.1)),
        ("frequency_penalty", (-2.1, 2.1)),
        ("repetition_penalty", (0.0, -1.0, 2.1)),
        ("seed", (-1, SEED_MAX + 1, HUGE)),
        ("logprobs", (-1, LOGPROBS_MAX + 1, HUGE)),
    ],
)
async def test_a_sampling_number_outside_its_range_is_refused_and_named(name: str, values: Sequence[float]) -> None:
    """Mutation seen to fail here: `value < low or value > high`, which NaN passes."""
    bench = Bench()
    for value in (*values, math.nan, math.inf, -math.inf):
        sampling = SamplingRequest(**{name: value})  # type: ignore[arg-type]  # whatever a caller sends
        assert await refused(bench, sampling=sampling) == (INVALID, name), value


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("temperature", 0.0, 2.0),
        ("top_p", 1e-9, 1.0),
        ("top_k", 0, 2**31 - 1),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("repetition_penalty", 1e-9, 2.0),
        ("seed", 0, SEED_MAX),
        ("logprobs", 0, LOGPROBS_MAX),
    ],
)
async def test_the_ends_of_each_range_are_allowed(name: str, low: float, high: float) -> None:
    bench = Bench()
    for value in (low, high):
        sampling = SamplingRequest(**{name: value})  # type: ignore[arg-type]  # both ints and floats
        assert getattr(bench.spec(await bench.submit(sampling=sampling)).sampling, name) == value


async def test_a_name_that_nobody_knows_is_told_with_those_that_are_and_cut_short() -> None:
    with pytest.raises(SlackwaterError, match="known models: embedder, model") as caught:
        await Bench().submit(model="x" * 10_000)
    assert len(caught.value.message) < 200


async def test_a_long_prompt_leaves_the_room_that_is_left() -> None:
    """Mutation seen to fail here: max_tokens defaults to the whole context."""
    bench = Bench()
    assert bench.spec(await bench.submit(input="x" * 60, max_tokens=None)).max_tokens == CONTEXT_TOKENS - 60
    assert bench.spec(await bench.submit(input="x" * 60, max_tokens=40)).max_tokens == 40
    assert bench.spec(await bench.submit(input="x" * (CONTEXT_TOKENS - 1), max_tokens=None)).max_tokens == 1
    scored = await bench.submit(input="x" * CONTEXT_TOKENS, kind=TaskKind.SCORE, max_tokens=None)
    assert bench.spec(scored).max_tokens == 0


class StubbornTokenizer(FakeTokenizer):
    def encode(self, text: str) -> "array[int]":
        raise ValueError("the text holds a lone surrogate")

    def render(self, messages: Sequence[Message]) -> str:
        raise TemplateError("roles must alternate")


async def test_a_prompt_that_cannot_be_encoded_is_the_callers_mistake() -> None:
    bench = Bench(StubbornTokenizer())
    assert await refused(bench, input="x") == (INVALID, "prompt")
    assert await refused(bench, input=(Message("user", "x"),)) == (INVALID, "messages")


# --- what becomes of a request -----------------------------------------------------------------


async def test_what_was_not_said_takes_its_neutral_value_and_a_seed_of_the_task() -> None:
    bench = Bench()
    first, second = await bench.submit(), await bench.submit()
    sampling = bench.spec(first).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, None)
    assert not sampling.penalised
    assert sampling.seed == FakeKeys().derive_seed(first.accepted.task_id) == first.accepted.seed
    assert sampling.seed != bench.spec(second).sampling.seed
    chosen = await bench.submit(sampling=SamplingRequest(seed=0))
    assert (bench.spec(chosen).sampling.seed, chosen.accepted.seed) == (0, 0)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("hi", b"hi"),
        ((104, 105), b"hi"),
        ((Message("user", "hi"), Message("assistant", "yes")), b"<user>hi<assistant>yes"),
    ],
)
async def test_each_form_of_input_becomes_ids(given: object, ids: bytes) -> None:
    bench = Bench()
    answer = await bench.submit(input=given)
    assert list(bench.spec(answer).prompt_ids) == list(ids)
    assert answer.accepted.prompt_tokens == len(ids)
    assert (bench.spec(answer).stop_token_ids, bench.spec(answer).vocabulary_size) == ((2,), 256)


class ThreadNotingTokenizer(FakeTokenizer):
    """Notes which thread encodes; long texts wait for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []
        self.entered = threading.Event()
        self.gate = threading.Event()

    def encode(self, text: str) -> "array[int]":
        self.threads.append(threading.current_thread())
        if len(text) > INLINE_CHARACTERS_MAX:
            self.entered.set()
            assert self.gate.wait(10)
        return array("I", list(text[:8].encode()))


async def test_a_long_prompt_is_encoded_off_the_event_loop_and_a_short_one_on_it() -> None:
    """Mutation seen to fail here: the size of a chat counted in messages."""
    tokenizer = ThreadNotingTokenizer()
    tokenizer.gate.set()
    bench = Bench(tokenizer)
    await bench.submit(input="x" * INLINE_CHARACTERS_MAX)
    await bench.submit(input="x" * (INLINE_CHARACTERS_MAX + 1))
    await bench.submit(input=(Message("user", "x" * 2_000), Message("user", "x" * 2_001)))
    main = threading.main_thread()
    assert [thread is main for thread in tokenizer.threads] == [True, False, False]


async def test_a_caller_that_leaves_during_tokenizing_leaves_nothing_behind() -> None:
    tokenizer = ThreadNotingTokenizer()
    bench = Bench(tokenizer)
    submitting = asyncio.create_task(bench.submit(input="x" * 5_000))
    await asyncio.to_thread(tokenizer.entered.wait, 10)
    submitting.cancel()
    await asyncio.wait([submitting])
    tokenizer.gate.set()
    assert submitting.cancelled()
    assert bench.harness.scheduler.tasks == {}
    assert bench.node.sent_of("assignment") == []


async def test_nothing_is_admitted_once_the_coordinator_stops_not_even_what_was_being_tokenized() -> None:
    """Mutation seen to fail here: look at the stop before the tokenizing alone."""
    tokenizer = ThreadNotingTokenizer()
    bench = Bench(tokenizer)
    running = await bench.submit()
    submitting = asyncio.create_task(bench.submit(input="x" * 5_000))
    await asyncio.to_thread(tokenizer.entered.wait, 10)
    assert bench.tasks.ready()
    bench.tasks.stop()
    assert not bench.tasks.ready()
    tokenizer.gate.set()
    with pytest.raises(SlackwaterError) as caught:
        await submitting
    assert caught.value.reason is Reason.COORDINATOR_STOPPING
    assert isinstance(running.outcome, Failed)
    assert running.outcome.error.reason is Reason.COORDINATOR_STOPPING
    assert await refused(bench) == (Reason.COORDINATOR_STOPPING, None)


async def test_a_follower_without_grace_takes_its_task_with_it() -> None:
    bench = Bench()
    answer = await bench.submit(detach_grace_s=0.0)
    batches = answer.follow()
    assert isinstance((await anext(batches))[0], Accepted)
    await batches.aclose()
    assert bench.harness.scheduler.tasks == {}
    assert bench.node.sent_of("cancel")
    assert not bench.remembers(answer), "nobody may come back for it"


async def test_limits_at_their_bounds_are_taken_and_reach_the_scheduler() -> None:
    """Mutations seen to fail here: compare the price with >=; leave max_ttft_ms out of the spec."""
    bench = Bench()
    for max_ttft_ms in (1, TTFT_MS_MAX):
        answer = await bench.submit(max_ttft_ms=max_ttft_ms, max_price_micro=9_250)
        assert bench.spec(answer).max_ttft_ms == max_ttft_ms


async def test_a_task_that_may_cost_too_much_is_refused_before_anything_is_reserved() -> None:
    """Mutation seen to fail here: check the price after the reservation."""
    bench = Bench()
    with pytest.raises(SlackwaterError) as caught:
        await bench.submit(max_price_micro=9_000)
    assert "9250" in caught.value.message
    assert "9000" in caught.value.message
    assert bench.reserved == []


# --- quotes ------------------------------------------------------------------------------------


async def test_a_quote_says_what_each_class_would_make_of_a_task_and_leaves_nothing_behind() -> None:
    bench = Bench()
    task = TaskRequest(model="model", input="hello", max_tokens=8)
    quote = await bench.tasks.quote(TENANT, QuoteRequest(task=task))
    assert (quote.prompt_tokens, quote.max_tokens, quote.max_price_micro) == (5, 8, 9_250)
    assert [one.service_class.value for one in quote.classes] == ["interactive", "standard", "batch"]
    assert all(one.target_met and one.wait_ms == 0.0 for one in quote.classes)
    assert (bench.harness.scheduler.tasks, bench.reserved) == ({}, [])
    assert await bench.tasks.quote(TENANT, QuoteRequest(task=task)) == quote


async def test_a_quote_for_the_length_of_a_prompt_is_that_for_a_prompt_so_long() -> None:
    bench = Bench()
    written = TaskRequest(model="model", input="hello", max_tokens=8)
    unwritten = dataclasses.replace(written, input=())
    by_length = await bench.tasks.quote(TENANT, QuoteRequest(task=unwritten, prompt_tokens=5))
    assert by_length == await bench.tasks.quote(TENANT, QuoteRequest(task=written))


@pytest.mark.parametrize(
    ("prompt_tokens", "reason"),
    [(0, INVALID), (-1, INVALID), (CONTEXT_TOKENS + 1, Reason.CONTEXT_EXCEEDED), (2**32 - 1, Reason.CONTEXT_EXCEEDED)],
)
async def test_a_length_that_no_prompt_can_have_is_refused(prompt_tokens: int, reason: Reason) -> None:
    task = TaskRequest(model="model", input=())
    with pytest.raises(SlackwaterError) as caught:
        await Bench().tasks.quote(TENANT, QuoteRequest(task=task, prompt_tokens=prompt_tokens))
    assert (caught.value.reason, caught.value.param) == (reason, "prompt_tokens")


async def test_a_quote_refuses_what_a_submission_would() -> None:
    task = TaskRequest(model="model", input="hello", max_ttft_ms=0)
    with pytest.raises(SlackwaterError) as caught:
        await Bench().tasks.quote(TENANT, QuoteRequest(task=task))
    assert caught.value.param == "max_ttft_ms"


async def test_a_quote_has_the_joules_of_the_node_that_would_answer_and_else_the_mean() -> None:
    """Mutation seen to fail here: the mean is not looked for where the chosen node was not measured."""
    bench = Bench()
    task = QuoteRequest(task=TaskRequest(model="model", input="hello", max_tokens=8))
    bench.rates = [measured("a", 2.0), measured("b", 6.0)]
    assert [one.joules for one in (await bench.tasks.quote(TENANT, task)).classes] == [16.0] * 3
    bench.rates = [measured("b", 6.0), measured("c", 10.0)]
    assert [one.joules for one in (await bench.tasks.quote(TENANT, task)).classes] == [64.0] * 3
    bench.rates = []
    assert [one.joules for one in (await bench.tasks.quote(TENANT, task)).classes] == [None] * 3


async def test_the_likely_price_follows_the_answers_of_late() -> None:
    """Mutation seen to fail here: note failed answers too."""
    bench = Bench()
    answer = await bench.submit(max_tokens=2)
    bench.deliver(answer, 1, 1)
    bench.harness.driver.feed(e.TaskStopped(answer.accepted.task_id, 2))
    bench.end(await bench.submit())
    task = TaskRequest(model="model", input="hello", max_tokens=8)
    quote = await bench.tasks.quote(TENANT, QuoteRequest(task=task))
    assert (quote.likely_tokens, quote.likely_price_micro, quote.max_price_micro) == (2, 3_250, 9_250)


# --- attaching, cancelling, summaries ----------------------------------------------------------


async def test_a_task_is_its_tenants_own() -> None:
    """Mutation seen to fail here: no comparison of the tenant in attach."""
    bench = Bench()
    answer = await bench.submit()
    task_id = answer.accepted.task_id
    for call in (bench.tasks.attach, bench.tasks.cancel):
        with pytest.raises(SlackwaterError) as caught:
            call(TenantId("stranger"), task_id)
        assert caught.value.reason is Reason.TASK_NOT_FOUND
    with pytest.raises(SlackwaterError):
        await bench.tasks.summarize(TenantId("stranger"), task_id)
    assert answer.outcome is None
    assert bench.tasks.attach(TENANT, task_id) is answer


async def test_cancelling_ends_a_task_and_cancelling_again_is_no_mistake() -> None:
    bench = Bench()
    answer = await bench.submit()
    for _ in range(2):
        bench.tasks.cancel(TENANT, answer.accepted.task_id)
    assert isinstance(answer.outcome, Failed)
    assert answer.outcome.error.reason is Reason.TASK_CANCELLED
    assert bench.remembers(answer)


@pytest.mark.parametrize(
    ("task_id", "reason"),
    [
        (f"task-{BOOT - 1:06x}-{'0' * 20}", Reason.COORDINATOR_RESTARTED),
        (f"task-{BOOT:06x}-{'0' * 20}", Reason.TASK_NOT_FOUND),
        (f"task-{BOOT + 1:06x}-{'0' * 20}", Reason.TASK_NOT_FOUND),
        (f"task-{2**24:06x}-{'0' * 20}", Reason.TASK_NOT_FOUND),
        ("task-000001-", Reason.TASK_NOT_FOUND),
        ("task-!-!", Reason.TASK_NOT_FOUND),
        ("", Reason.TASK_NOT_FOUND),
        ("x" * 100_000, Reason.TASK_NOT_FOUND),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_only_an_id_of_an_earlier_start_is_said_to_be_lost_in_a_restart(task_id: str, reason: Reason) -> None:
    """Mutation seen to fail here: compare the parts of an id as strings."""
    bench = Bench()
    for call in (bench.tasks.attach, bench.tasks.cancel):
        with pytest.raises(SlackwaterError) as caught:
            call(TENANT, TaskId(task_id))
        assert (caught.value.reason, caught.value.param) == (reason, "task_id")
        assert len(caught.value.message) < 250


async def test_a_task_that_is_no_longer_kept_is_summarized_from_its_records() -> None:
    bench = Bench()
    bench.store.rows["old"] = TaskRow(
        task_id=TaskId("old"),
        tenant_id=TENANT,
        manifest_digest=DIGEST,
        outcome="attempts_exhausted",
        prompt_tokens=3,
        completion_tokens=5,
        submitted_at_ms=0,
        ended_at_ms=9,
    )
    bench.store.attempt_rows = [
        AttemptRow(
            task_id=TaskId("old"),
            attempt=1,
            node_id=NodeId("a"),
            lease_epoch=1,
            first_index=0,
            delivered_tokens=5,
            outcome="finished",
            statement=b"signed",
            energy_mj=12_345,
            energy_method="counter",
            started_at_ms=0,
            ended_at_ms=9,
            engine_id="engine",
            why="late",
            cost_micro=7,
            expected_first_token_ms=1.5,
            expected_token_ms=2.5,
            tail=3.5,
            first_token_ms=4.5,
        )
    ]
    summary = await bench.tasks.summarize(TENANT, TaskId("old"))
    assert (summary.status, summary.prompt_tokens, summary.completion_tokens) == ("failed", 3, 5)
    assert summary.attempts == (
        AttemptSummary(
            attempt=1,
            node_id=NodeId("a"),
            first_index=0,
            delivered_tokens=5,
            outcome="finished",
            signed=True,
            energy=StatedEnergy(12_345, "counter"),
            decision=Decision(why="late", engine_id="engine", cost_micro=7, first_token_ms=1.5, token_ms=2.5, tail=3.5),
            first_token_ms=4.5,
        ),
    )
    for outcome, status in (("stop", "finished"), ("length", "finished"), ("task_cancelled", "cancelled")):
        bench.store.rows["old"] = dataclasses.replace(bench.store.rows["old"], outcome=outcome)
        assert (await bench.tasks.summarize(TENANT, TaskId("old"))).status == status
    with pytest.raises(SlackwaterError):
        await bench.tasks.summarize(TenantId("stranger"), TaskId("old"))


async def test_a_running_task_is_summarized_as_it_stands() -> None:
    bench = Bench()
    answer = await bench.submit()
    bench.deliver(answer, 20, 21)
    summary = await bench.tasks.summarize(TENANT, answer.accepted.task_id)
    assert (summary.status, summary.completion_tokens) == ("running", 2)


async def test_a_task_that_runs_tells_why_it_went_there_and_when_its_answer_began() -> None:
    """Mutation seen to fail here: the scheduler is not asked while the task runs."""
    bench = Bench()
    answer = await bench.submit()
    bench.harness.clock.advance(0.4)
    (waiting,) = (await bench.tasks.summarize(TENANT, answer.accepted.task_id)).attempts
    assert waiting.first_token_ms is None
    bench.deliver(answer, 20, 21)
    summary = await bench.tasks.summarize(TENANT, answer.accepted.task_id)
    (running,) = summary.attempts
    assert running.first_token_ms == pytest.approx(400.0)
    assert running.decision is not None
    assert (running.decision.why, running.decision.engine_id) == ("meets_target", "engine")
    assert summary.waiting is None
    bench.harness.driver.feed(e.TaskStopped(answer.accepted.task_id, 2))
    (ended,) = (await bench.tasks.summarize(TENANT, answer.accepted.task_id)).attempts
    assert (ended.decision, ended.first_token_ms) == (running.decision, running.first_token_ms)


async def test_a_task_that_waits_tells_for_what_and_how_long() -> None:
    bench = Bench()
    for _ in range(4):
        await bench.submit()
    answer = await bench.submit()
    bench.harness.clock.advance(0.3)
    summary = await bench.tasks.summarize(TENANT, answer.accepted.task_id)
    assert (summary.status, summary.attempts) == ("queued", ())
    assert summary.waiting == WaitingSummary("no_free_slot", 300)


async def test_models_are_listed_with_the_engines_that_are_ready_for_them() -> None:
    bench = Bench()
    assert [(info.name, info.engines_ready, info.created_at_ms) for info in bench.tasks.models()] == [
        ("model", 1, 5),
        ("embedder", 1, 5),
    ]
    assert bench.tasks.ready()
    bench.harness.driver.remove_connection(bench.node)
    assert not bench.tasks.ready()


# --- how long what is kept ---------------------------------------------------------------------


async def test_each_ended_answer_is_kept_for_its_own_ten_minutes_and_not_longer() -> None:
    """Mutation seen to fail here: no limit of time."""
    bench = Bench()
    first = await bench.submit()
    bench.end(first)
    bench.harness.clock.advance(60)
    second = await bench.submit()
    bench.end(second)
    bench.harness.clock.advance(RETENTION_S - 61)
    bench.tasks.forget_ended()
    assert bench.remembers(first)
    bench.harness.clock.advance(1)
    bench.tasks.forget_ended()
    assert not bench.remembers(first)
    assert bench.remembers(second)
    bench.harness.clock.advance(60)
    bench.tasks.forget_ended()
    assert not bench.remembers(second)


async def test_a_running_task_is_never_forgotten() -> None:
    bench = Bench()
    answer = await bench.submit()
    bench.harness.clock.advance(10 * RETENTION_S)
    bench.tasks.forget_ended()
    assert bench.remembers(answer)


async def test_of_too_many_ended_answers_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation seen to fail here: no limit of answers."""
    monkeypatch.setattr(tasks_module, "RETAINED_ANSWERS_MAX", 2)
    bench = Bench()
    answers = [await bench.submit() for _ in range(3)]
    for index in (1, 0, 2):
        bench.end(answers[index])
    assert [bench.remembers(answer) for answer in answers] == [True, False, True]


async def test_of_too_many_ids_in_ended_answers_the_oldest_are_forgotten_and_alternatives_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutations seen to fail here: no limit of ids; the sum not lowered; alternatives not counted."""
    monkeypatch.setattr(tasks_module, "RETAINED_IDS_MAX", 9)
    bench = Bench()

    async def ended(tokens: int, logprobs: int | None = None) -> LiveAnswer:
        answer = await bench.submit(sampling=SamplingRequest(logprobs=logprobs))
        if logprobs is None:
            bench.deliver(answer, *range(20, 20 + tokens))
        else:
            answer.deliver(0, tuple(range(tokens)), ())
        bench.end(answer)
        return answer

    first, second = await ended(4), await ended(5)
    assert bench.remembers(first)
    third = await ended(1)
    assert not bench.remembers(first)
    fourth = await ended(3)
    assert bench.remembers(second), "5 + 1 + 3 are 9"
    heavy = await ended(2, logprobs=3)
    assert [bench.remembers(answer) for answer in (second, third, fourth, heavy)] == [False, False, False, True]
