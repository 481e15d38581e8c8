"""How long anything may take, how many there may be, and which failures speak against a node. Pure."""

from dataclasses import dataclass

# Another engine answered first.
HEDGED = "hedged"
# The owner of the node does not accept such tasks.
NOT_CONSENTED = "refused_consent"
# The node did nothing wrong and may well finish the next attempt.
BLAMELESS = frozenset(
    {
        "drained",
        "stopping",
        "owner_returned",
        "refused_busy",
        "refused_draining",
        NOT_CONSENTED,
        # Its owner came back while the order was on its way.
        "refused_engine_not_ready",
        # Its owner asks for more since then.
        "refused_ask",
    }
)

# The engine does not take another attempt now.
ENGINE_DOWN = frozenset({"owner_returned", "refused_engine_not_ready", "refused_ask"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every wait and every count of the scheduler, in seconds where a unit is missing."""

    # A node that runs attempts speaks at least every second (heartbeat_busy_ms);
    # two lost heartbeats and a little are no accident any more, and leave time to
    # resume elsewhere within 3 s of the last word.
    silence_busy_s: float = 2.4
    # One attempt silent past its first token while others of the node advance.
    stall_s: float = 5.0
    # The same where no other attempt can tell; the agent's own canary is faster.
    stall_alone_s: float = 60.0
    # A first token may take this, plus the prompt at the slowest prefill we accept.
    first_token_s: float = 30.0
    prefill_tokens_per_second_min: float = 20.0
    # An assignment that the node's reports do not show by then was lost.
    assignment_seen_s: float = 10.0
    # A node that failed a task is left alone by this task for so long
    # (the figure Dynamo uses for the same purpose). Not one whose owner came back
    # once: its report says when it is ready again.
    avoid_s: float = 5.0
    # Attempts in a row without a new id, and attempts in all: a task that kills
    # engines must not wander through the whole fleet.
    fruitless_attempts_max: int = 5
    attempts_max: int = 100
    # Waiting for a slot, and waiting while no connected node has the model at all.
    queue_wait_s: float = 60.0
    no_capacity_wait_s: float = 10.0
    # Waiting for an engine that was unloaded, or for a model that is expected on one within that time: vLLM takes up to
    # four minutes to load and compile a large model.
    wake_wait_s: float = 300.0
    # Of a class and those above it: three times as many in all.
    queue_tasks_max: int = 4096
    # Of the interactive tasks, so many may have a second attempt because their first token is late, and so many at once
    # after a time in which none was needed. Few are late, so few are enough: "The Tail at Scale" (Dean and Barroso,
    # 2013) hedges after the 95th percentile, which bounds the additional work to 5 %.
    hedge_share: float = 0.03
    hedges_saved_max: float = 3.0
    # Ticks come every 0.1 s; a gap this long means that this process was stopped
    # or starved, and the missed time is nobody's fault.
    sleep_gap_s: float = 0.3
