"""What is told of a task that was answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.store.port import AttemptRow
from inference.task import FinishReason, TaskSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A task that was answered, for whoever looks at answers afterwards. Holds ids of a prompt: keep it from logs."""

    spec: TaskSpec
    finish_reason: FinishReason
    output_ids: Sequence[int]
    # In order; the last one may lack a statement, as where a stop string ended it.
    attempts: Sequence[AttemptRow]
    # By number of the attempt: how its engine drew when it was chosen, whatever it says by now.
    sampler_profiles: Mapping[int, str]
