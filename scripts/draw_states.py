"""Draw docs/states.md from the decisions themselves.

The engine's diagram is found by trying: from every state that can be reached,
every event is fed to a fresh copy, and where it leads is drawn. `--check`
writes nothing and fails where the committed page differs.
"""

import copy
import sys
from pathlib import Path

from agent.engines.state import (
    BecameReady,
    Cleared,
    EngineLimits,
    EngineState,
    Event,
    Exited,
    KillFailed,
    Spawned,
    SpawnFailed,
    StartRequested,
    StopRequested,
    Tick,
    Unhealthy,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "states.md"
LIMITS = EngineLimits(start_deadline_s=60.0)
# The restart budget is spent after a handful of failures; by then every state has been seen.
DEPTH_MAX = 12

TEXT = """# State machines

Made by `scripts/draw_states.py`; edit the code, or the text in that script, not this page.

## An engine, seen by its supervisor (`agent/engines/state.py`)

Found by feeding every event to every reachable state. An event that is not drawn changes no state.

```mermaid
stateDiagram-v2
    [*] --> stopped
{engine}
```

- *starting*: a process exists or is about to, and has not generated a token yet.
- *ready*: it generated tokens when asked to, and still does.
- *backing_off*: it broke; the next start waits, longer each time.
- *failed*: the restart budget is spent, or a process survives SIGKILL. It is tried again after a long pause.
- *stopping*: it is being ended because it is not wanted.
- *stopped*: no process, and none is wanted.

## An attempt at an agent (`agent/state.py`)

```mermaid
stateDiagram-v2
    [*] --> receiving: Assignment, checked
    receiving --> running: nonce durable and prompt whole
    running --> signing: engine finished
    signing --> [*]: AttemptEnded (finished)
    receiving --> [*]: AssignmentRefused, or the connection is lost
    running --> [*]: AttemptEnded (failed), or the connection is lost
```

## A task at the coordinator (`coordinator/scheduler/state.py`)

```mermaid
stateDiagram-v2
    [*] --> queued: TaskSubmitted
    queued --> running: an engine has a free slot (a new attempt, a new lease)
    running --> queued: the attempt broke, failover says restart or resume
    running --> finished: the node finished, or a stop string matched
    running --> finished: the attempt broke, and the last id had ended the answer
    running --> failed: the attempt broke, and going on would change the answer
    queued --> failed: nobody can take it in time, or too many attempts
    queued --> cancelled: TaskCancelled
    running --> cancelled: TaskCancelled
```
"""


def sample_events(start: int) -> list[Event]:
    """Return one event of each kind, about the newest start."""
    return [
        StartRequested(),
        StopRequested(),
        Spawned(start, 1000 + start),
        SpawnFailed(start, "no such file"),
        BecameReady(start, 50.0),
        Unhealthy(start, "no token"),
        Exited(start, "exit status 1"),
        Cleared(start),
        KillFailed(start, (1000 + start,)),
        Tick(),
    ]


def engine_transitions() -> list[tuple[str, str, str]]:
    """Return (state, event, next state) for all that can happen, in a stable order."""
    found: set[tuple[str, str, str]] = set()
    frontier = [(EngineState(LIMITS), 0.0)]
    seen: set[tuple[object, ...]] = set()
    for _ in range(DEPTH_MAX):
        following = []
        for state, now in frontier:
            for event in sample_events(state.start):
                changed = copy.deepcopy(state)
                # A tick comes when it is due; everything else soon.
                later = max(now, state.wake_at or now) if isinstance(event, Tick) else now + 0.1
                changed.handle(event, later)
                if changed.state is not state.state:
                    found.add((state.state.value, type(event).__name__, changed.state.value))
                key = (changed.state, changed.process, changed.restarts)
                if key not in seen:
                    seen.add(key)
                    following.append((changed, later))
        frontier = following
    return sorted(found)


def draw() -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    for source, event, target in engine_transitions():
        arrows.setdefault((source, target), []).append(event)
    lines = [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
    return TEXT.format(engine="\n".join(lines))


def main() -> None:
    page = draw()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != page:
            sys.exit("docs/states.md differs from what the code does; run scripts/draw_states.py and commit the result")
        return
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
