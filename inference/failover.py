"""What becomes of a task whose attempt ended early. Pure.

Shared by the coordinator's scheduler and, on the direct path, by the SDK. The
rules follow from what the client has already seen:

  resume    ids were received: prompt and received ids become the new prompt,
            the limit shrinks by their count, and the answer goes on at the
            next index. Holds for draws that depend on the ids alone.
  restart   nobody has read the ids (none came, or the answer does not stream)
            and resuming would change the draw: begin again as if for the
            first time.
  replay    penalised or constrained draws depend on which ids are *output*;
            received ids sent as prompt would be forgotten by the penalty. An
            engine that can force ids as output is needed; until one can, such
            a task fails with MigrationImpossible rather than change its rules
            in mid-answer.
  complete  the last received id already ended the answer; only the goodbye of
            the node was lost.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from inference.task import FinishReason, TaskKind, TaskSpec, token_array


@dataclass(frozen=True, slots=True)
class Begin:
    """Run this: the first attempt, a restart (first_index 0), or a resumption."""

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
    """Whether a failure after the first id was read can be survived."""
    return not spec.sampling.penalised


def plan(spec: TaskSpec, received_ids: Sequence[int]) -> Begin | Complete | MigrationImpossible:
    """Decide how a task goes on after the ids received so far; with none, how it begins."""
    if not received_ids or spec.kind is not TaskKind.GENERATE:
        return _from_the_start(spec)
    if received_ids[-1] in spec.stop_token_ids:
        return Complete(FinishReason.STOP)
    if len(received_ids) >= spec.max_tokens:
        return Complete(FinishReason.LENGTH)
    if resumable(spec):
        return Begin(
            prompt_ids=spec.prompt_ids + token_array(received_ids),
            max_tokens=spec.max_tokens - len(received_ids),
            first_index=len(received_ids),
        )
    if not spec.streaming:
        return _from_the_start(spec)
    return MigrationImpossible(
        "the node that served this answer was lost, and another would count the ids so far as prompt, not as output "
        "to penalise; submit it again, or without presence_penalty, frequency_penalty and repetition_penalty"
    )


def _from_the_start(spec: TaskSpec) -> Begin:
    return Begin(prompt_ids=spec.prompt_ids, max_tokens=spec.max_tokens, first_index=0)
