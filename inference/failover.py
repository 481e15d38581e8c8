"""What becomes of a task whose attempt ended early. Pure.

Shared by the coordinator's scheduler and, on the direct path, by the SDK. The
rules follow from what the client has already seen:

  restart   nothing was delivered (always so for answers that do not stream):
            the task begins again as if for the first time.
  resume    ids were delivered: prompt and delivered ids become the new prompt,
            the limit shrinks by their count, and the answer goes on at the
            next index. Holds for draws that depend on the ids alone.
  replay    penalised or constrained draws depend on which ids are *output*;
            delivered ids sent as prompt would be forgotten by the penalty. An
            engine that can force ids as output is needed; until one can, such
            a task fails with MigrationImpossible rather than change its rules
            in mid-answer.
  complete  the last delivered id already ended the answer; only the goodbye of
            the node was lost.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from inference.task import FinishReason, TaskSpec, token_array


@dataclass(frozen=True, slots=True)
class Begin:
    """Run this: the first attempt, a restart, or a resumption."""

    prompt_ids: "array[int]"
    max_tokens: int
    first_index: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Nothing is left to run."""

    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class MigrationImpossible:
    """Going on would change the answer; the reason is for the client."""

    reason: str


def resumable(spec: TaskSpec) -> bool:
    """Whether a failure after the first delivered id can be survived."""
    return not spec.sampling.penalised


def plan(spec: TaskSpec, delivered_ids: Sequence[int]) -> Begin | Complete | MigrationImpossible:
    """Decide how a task goes on after its delivered ids; with none, how it begins."""
    if not delivered_ids:
        return Begin(prompt_ids=spec.prompt_ids, max_tokens=spec.max_tokens, first_index=0)
    if delivered_ids[-1] in spec.stop_token_ids:
        return Complete(FinishReason.STOP)
    if len(delivered_ids) >= spec.max_tokens:
        return Complete(FinishReason.LENGTH)
    if not resumable(spec):
        return MigrationImpossible(
            "penalties count the ids of the answer so far, which another node would read as part of the prompt; "
            "submit without presence_penalty, frequency_penalty and repetition_penalty, or again from the start"
        )
    return Begin(
        prompt_ids=spec.prompt_ids + token_array(delivered_ids),
        max_tokens=spec.max_tokens - len(delivered_ids),
        first_index=len(delivered_ids),
    )
