"""A prompt that begins like one before goes where that was read, for the same tenant, while its target is kept."""

from dataclasses import replace

from coordinator.ledger.prices import Price
from coordinator.scheduler import commands as c
from coordinator.scheduler.affinity import BEGINNING_TOKENS_MIN, BEGINNINGS_MAX, KEPT_S, Affinity
from coordinator.scheduler.records import Why
from coordinator.scheduler.testing import SchedulerHarness, engine_view, task_spec
from inference.task import EngineId, NodeId, TaskSpec, TenantId

LONG = range(3, 3 + 2 * BEGINNING_TOKENS_MIN)
ENGINE = (NodeId("b"), EngineId("engine"))


def assigned(commands: list[c.Command]) -> c.Assign:
    (command,) = [command for command in commands if isinstance(command, c.Assign)]
    return command


def next_turn(name: str, tenant: str = "tenant") -> TaskSpec:
    spec = task_spec(name, prompt=[*LONG, 9, 9, 9])
    return replace(spec, tenant_id=TenantId(tenant))


def after_one_turn() -> tuple[SchedulerHarness, str]:
    """Return a fleet of three of which one has answered a long prompt, and its name."""
    harness = SchedulerHarness()
    for name in "abc":
        harness.connect(name, engine_view(slots=2))
    # Somebody else is on the first, so that the turn is read by another one.
    harness.submit(task_spec("other"))
    order = assigned(harness.submit(task_spec("task", prompt=LONG)))
    harness.frames(order.node_id, 1, 0, *range(20, 28))
    harness.finish(order.node_id, 1, range(20, 28))
    return harness, order.node_id


def test_the_next_turn_goes_where_the_last_one_was_read() -> None:
    """Mutation seen to fail here: `_warm` finds nothing."""
    harness, name = after_one_turn()
    order = assigned(harness.submit(next_turn("next")))
    assert (order.node_id, order.choice.why, order.choice.cached_tokens) == (name, Why.WARM, len(LONG))
    cold = assigned(harness.submit(task_spec("cold", prompt=[*reversed(LONG)])))
    assert (cold.choice.why, cold.choice.cached_tokens) == (Why.MEETS_TARGET, 0)
    assert order.choice.first_token_s < cold.choice.first_token_s


def test_another_tenant_is_not_sent_where_somebody_elses_prompt_was_read() -> None:
    """Mutation seen to fail here: the tenant left out of the key."""
    harness, _ = after_one_turn()
    assert assigned(harness.submit(next_turn("next", tenant="other"))).choice.why is Why.MEETS_TARGET


def test_an_engine_that_is_full_or_asks_for_more_is_warm_in_vain() -> None:
    """Mutations seen to fail here: a full engine is taken; whatever it asks."""
    harness, name = after_one_turn()
    for number in range(2):
        assert assigned(harness.submit(next_turn(f"busy-{number}"))).node_id == name
    assert assigned(harness.submit(next_turn("next"))).node_id != name
    harness, name = after_one_turn()
    for other in "abc":
        ask = Price(200_000, 400_000) if other == name else Price(100_000, 400_000)
        running = [("other", 1)] if other == "a" else []
        harness.report(other, engine_view(slots=2, ask=ask), running=running)
    assert assigned(harness.submit(next_turn("next"))).node_id != name


def test_where_only_the_engine_that_knows_the_prompt_is_in_time_it_gets_it_whatever_it_asks() -> None:
    """Mutation seen to fail here: a warm engine is looked at beside a cold one alone."""
    harness, name = after_one_turn()
    # On that engine all of the prompt takes up to 65 ms and its last three tokens 40, on the others 167 ms.
    spec = replace(next_turn("next"), max_ttft_ms=50)
    order = assigned(harness.submit(spec))
    assert (order.node_id, order.choice.why) == (name, Why.WARM)


def test_what_was_read_long_ago_is_forgotten() -> None:
    affinity = Affinity()
    affinity.sent(next_turn("a"), ENGINE, 0.0)
    assert affinity.warm(next_turn("b"), KEPT_S) == (ENGINE, len(LONG))
    assert affinity.warm(next_turn("b"), KEPT_S + 1.0) is None


def test_the_longest_beginning_counts_and_short_prompts_have_none() -> None:
    """Mutation seen to fail here: the hash of a beginning does not go on from the one before."""
    affinity = Affinity()
    affinity.sent(task_spec("a", prompt=range(3, 3 + 1024)), ENGINE, 0.0)
    half = task_spec("b", prompt=[*range(3, 3 + 512), *range(512)])
    assert affinity.warm(half, 0.0) == (ENGINE, 512)
    assert affinity.warm(task_spec("c", prompt=[7, *range(3, 3 + 1024)]), 0.0) is None
    mixed = [*range(3, 3 + 256), *range(256)]
    affinity.sent(task_spec("e", prompt=[*range(9, 9 + 256), *range(256)]), ENGINE, 0.0)
    assert affinity.warm(task_spec("f", prompt=mixed), 0.0) == (ENGINE, 256)
    affinity.sent(task_spec("d", prompt=[1] * (BEGINNING_TOKENS_MIN - 1)), ENGINE, 0.0)
    assert affinity.warm(task_spec("d", prompt=[1] * (BEGINNING_TOKENS_MIN - 1)), 0.0) is None


def test_the_memory_is_bounded() -> None:
    affinity = Affinity()
    for number in range(BEGINNINGS_MAX + 10):
        spec = task_spec("a", prompt=[number % 1000, number // 1000 + 5, *range(3, 1 + BEGINNING_TOKENS_MIN)])
        affinity.sent(spec, ENGINE, 0.0)
    assert len(affinity._beginnings) == BEGINNINGS_MAX
