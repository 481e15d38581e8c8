"""What each service class promises, and in which order classes are served. Pure."""

import math
from dataclasses import dataclass
from typing import Final

from inference.task import ServiceClass, TaskSpec

# Strict precedence of the queue's bands.
BANDS: Final = (ServiceClass.INTERACTIVE, ServiceClass.STANDARD, ServiceClass.BATCH)


@dataclass(frozen=True, slots=True)
class Target:
    """How soon an answer begins, and how fast it goes on. Seconds; infinite where nobody waits for it."""

    first_token_s: float
    token_s: float


# First tokens: a reader's train of thought survives a second, the attention ten (Nielsen, Usability Engineering, 1993,
# ch. 5). Pace: people read some 250 words a minute, or 5 tokens a second; half of that time keeps an answer ahead.
TARGETS: Final = {
    ServiceClass.INTERACTIVE: Target(first_token_s=1.0, token_s=0.1),
    ServiceClass.STANDARD: Target(first_token_s=10.0, token_s=0.2),
    ServiceClass.BATCH: Target(first_token_s=math.inf, token_s=math.inf),
}


def target_of(spec: TaskSpec) -> Target:
    """Return what a task is owed: its class's target, or its own limit for the first token."""
    target = TARGETS[spec.service_class]
    if spec.max_ttft_ms is None:
        return target
    return Target(spec.max_ttft_ms / 1000.0, target.token_s)
