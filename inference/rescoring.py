"""Is this output a plausible run of that model under that sampler? Pure.

A reference model reads prompt and output at once (a SCORE task) and says, for
every output id, how likely it and its most likely rivals were. The sampler's
noise is recomputed from the seed. The *margin* of an id is by how much the best
rival beats it, in units of logits: zero for an honest draw but where the two
engines' arithmetic differs by more than the gap between two candidates.

Only the listed rivals (20 of tens of thousands of ids) are compared. The best
of some is at most the best of all, so a margin can be too small, never too
large: an honest node is never charged for what was not listed, and calibration
measures the very same quantity. The price is power: a cheat is not charged for
ids that an unlisted rival would have beaten.

What the list leaves over is of use all the same. The noise of the listed ids is
known, so the chance is too that an id from outside wins against them: what is
left over of the probability runs a race against the best listed one. A sampler
of another temperature draws from outside less or more often than that.

Margins are in logits, temperature times the difference of the sums that the
sampler compares, so that they grow out of the greedy case without a jump; an
error of the arithmetic is of one size in logits, whatever the temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inference.sampler_noise import candidate_noise, is_known
from inference.sampling import Floats
from inference.task import FinishReason, PositionLogprobs, Sampling
from inference.truncation import allowed_candidates

# Token-DiFR's clip (arXiv 2511.20621): one wild id weighs no more than a few ordinary flips.
MARGIN_CLIP: Final = 0.5
# An id that loses by so many nats and is no likely one was not drawn from this model, whatever the arithmetic
# (GLS > -5 and rank > 32 in arXiv 2511.02620). The largest honest margin on record is in docs/verification.md.
HARD_MARGIN: Final = 5.0
HARD_RANK: Final = 32
# A stop that loses by more was not drawn. GRAIL also asks for a probability of 0.02; a sampler draws rarer ones
# honestly, and its noise says when it did.
STOP_MARGIN: Final = 1.0
# Rivals without which a drawn id is compared with too little.
CANDIDATES_MIN: Final = 5
# A penalty pushes listed rivals down, so that more of them are needed: a whole list.
PENALISED_CANDIDATES_MIN: Final = 20


class FailureKind(Enum):
    """What no honest engine does. Every one of them is a reason for a second verifier."""

    IMPOSSIBLE_ID = "impossible_id"  # far below anything that could have been drawn
    EXCLUDED_ID = "excluded_id"  # top-k or top-p rules it out by a clear distance
    FALSE_STOP = "false_stop"  # the answer ends with an id that the sampler would not have drawn there
    NO_STOP_ID = "no_stop_id"  # finished as "stop" without a stop id at the end
    IDS_AFTER_STOP = "ids_after_stop"  # went on after a stop id
    SHORT_OF_LENGTH = "short_of_length"  # finished as "length" before max_tokens
    TOO_LONG = "too_long"  # more ids than max_tokens


@dataclass(frozen=True, slots=True)
class HardFailure:
    """One of the above, where it is, and by how many nats (0 where it is a matter of form)."""

    kind: FailureKind
    index: int
    nats: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one node did for a task, and what a reference model makes of it.

    Attributes:
        prompt_ids: of this attempt; for a resumed one that is prompt and ids delivered before.
        max_tokens: of this attempt.
        sampler_profile: of the engine that drew.
        finish_reason: None where the attempt was ended from outside (cancelled, resumed elsewhere).
        reference: one per output id, see `reference_of`; empty where none could be had.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling: Sampling
    sampler_profile: str
    stop_token_ids: Sequence[int]
    max_tokens: int
    finish_reason: FinishReason | None
    reference: Sequence[PositionLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """What came of it.

    Attributes:
        margins: one per checked id, in nats, clipped at `MARGIN_CLIP`.
        worst_margin: the largest, not clipped.
        unlisted: for each checked id whether it is none of the listed ones.
        unlisted_rates: for each checked id how an id from outside the list was to win, as the rate of a Poisson
            process: the chance is 1 - exp(-rate). Empty where it is not known: it is at temperature 1 without top-k,
            top-p and penalties.
        failures: in the order of the output.
        could_not_measure: why the ids could not be checked; says nothing about the node. Failures of form
            (lengths, stop ids) may stand beside it.
    """

    temperature: float
    margins: tuple[float, ...] = ()
    worst_margin: float = 0.0
    unlisted: tuple[bool, ...] = ()
    unlisted_rates: tuple[float, ...] = ()
    failures: tuple[HardFailure, ...] = ()
    could_not_measure: str | None = None

    @property
    def tokens_checked(self) -> int:
        return len(self.margins)

    @property
    def mean_margin(self) -> float:
        """In nats; 0 where nothing was checked."""
        return sum(self.margins) / len(self.margins) if self.margins else 0.0


def reference_of(scores: Sequence[PositionLogprobs], prompt_tokens: int) -> tuple[PositionLogprobs, ...]:
    """Return the part of a SCORE answer over prompt and output that is about the output."""
    return tuple(scores[prompt_tokens - 1 :])


def rescore(attempt: Attempt) -> Rescored:
    """Judge one attempt. Takes some 10 ms for a thousand ids: not for an event loop."""
    form = _failures_of_form(attempt)
    temperature = attempt.sampling.temperature
    reason = _why_not_measurable(attempt)
    if reason is not None:
        return Rescored(temperature=temperature, failures=form, could_not_measure=reason)
    table = _Table.of(attempt)
    if len(table.chosen_ids) == 0:
        return Rescored(temperature=temperature, failures=form)
    margins, best = _margins(attempt, table)
    left_over = np.maximum(1.0 - np.exp(table.logprobs).sum(axis=1), 0.0)
    rates = left_over * np.exp(-best) if _draws_as_the_model_says(attempt.sampling) else np.zeros(0)
    failures = [*form, *_failures_of_draws(attempt, table, margins)]
    return Rescored(
        temperature=temperature,
        margins=tuple(np.clip(margins, 0.0, MARGIN_CLIP).tolist()),
        worst_margin=float(margins.max()),
        unlisted=tuple((table.ids != table.chosen_ids[:, None]).all(axis=1).tolist()),
        unlisted_rates=tuple(rates.tolist()),
        failures=tuple(sorted(failures, key=lambda failure: failure.index)),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """Candidates of every output id, one line each: the listed rivals from the most likely down, the chosen apart.

    `logprobs` are after presence and frequency penalties. Lines are as long as the longest list; -inf fills them.
    """

    ids: NDArray[np.uint64]
    logprobs: Floats
    chosen_ids: NDArray[np.uint64]
    chosen_logprobs: Floats
    chosen_ranks: NDArray[np.int64]
    # The largest log-probability that an unlisted id may have.
    unlisted_most: Floats

    @classmethod
    def of(cls, attempt: Attempt) -> "_Table":
        width = max((len(position.top) for position in attempt.reference), default=0)
        shape = (len(attempt.reference), width)
        ids = np.zeros(shape, dtype=np.uint64)
        logprobs = np.full(shape, -np.inf)
        for line, position in enumerate(attempt.reference):
            ids[line, : len(position.top)] = [candidate.token_id for candidate in position.top]
            logprobs[line, : len(position.top)] = [candidate.logprob for candidate in position.top]
        unlisted_most = np.min(logprobs, axis=1, initial=np.inf, where=np.isfinite(logprobs))
        if min(attempt.sampling.presence_penalty, attempt.sampling.frequency_penalty) < 0.0:
            # A bonus lifts ids that were output before to wherever.
            unlisted_most = np.full(len(logprobs), np.inf)
        chosen_ids = np.array(attempt.output_ids, dtype=np.uint64)
        chosen = np.array([position.chosen.logprob for position in attempt.reference], dtype=np.float64)
        ranks = np.array([position.chosen.rank for position in attempt.reference], dtype=np.int64)
        # An engine that does not say the rank of an unlisted id: it is behind the list.
        listed = (ids == chosen_ids[:, None]).any(axis=1)
        ranks = np.where((ranks == 0) & ~listed, width + 1, ranks)
        if attempt.sampling.penalised:
            logprobs, chosen = _penalised(attempt, ids, logprobs, chosen)
        order = np.argsort(-logprobs, axis=1, kind="stable")
        return cls(
            np.take_along_axis(ids, order, axis=1),
            np.take_along_axis(logprobs, order, axis=1),
            chosen_ids,
            chosen,
            ranks,
            unlisted_most,
        )


def _why_not_measurable(attempt: Attempt) -> str | None:
    """Say what is missing, if anything; never the node's fault."""
    sampling, reference = attempt.sampling, attempt.reference
    if len(reference) != len(attempt.output_ids):
        return f"{len(reference)} reference positions for {len(attempt.output_ids)} output ids"
    if any(position.chosen.token_id != id_ for position, id_ in zip(reference, attempt.output_ids, strict=True)):
        return "the reference is about other ids than the output"
    if not sampling.greedy and not is_known(attempt.sampler_profile):
        return f"the draws of sampler profile {attempt.sampler_profile!r} cannot be recomputed"
    if sampling.repetition_penalty != 1.0:
        return "a repetition penalty scales logits, and a reference gives log-probabilities"
    needed = PENALISED_CANDIDATES_MIN if sampling.penalised else CANDIDATES_MIN
    if any(len(position.top) < needed for position in reference):
        return f"fewer than {needed} candidates at some position of the reference"
    numbers = [position.chosen.logprob for position in reference]
    numbers += [candidate.logprob for position in reference for candidate in position.top]
    if not np.isfinite(numbers).all():
        return "the reference holds log-probabilities that are no numbers"
    return None


def _failures_of_form(attempt: Attempt) -> tuple[HardFailure, ...]:
    """Judge the ending and the length; needs no reference."""
    output, stops = attempt.output_ids, frozenset(attempt.stop_token_ids)
    found = [HardFailure(FailureKind.IDS_AFTER_STOP, index) for index, id_ in enumerate(output[:-1]) if id_ in stops]
    last = max(len(output) - 1, 0)
    if len(output) > attempt.max_tokens:
        found.append(HardFailure(FailureKind.TOO_LONG, last))
    ends_with_stop = bool(output) and output[-1] in stops
    if attempt.finish_reason is FinishReason.STOP and not ends_with_stop:
        found.append(HardFailure(FailureKind.NO_STOP_ID, last))
    if attempt.finish_reason is FinishReason.LENGTH and len(output) < attempt.max_tokens:
        found.append(HardFailure(FailureKind.SHORT_OF_LENGTH, last))
    return tuple(found[:1])


def _margins(attempt: Attempt, table: _Table) -> tuple[Floats, Floats]:
    """Return by how much each id loses against the best listed rival, in nats, at least 0; and that rival's sum."""
    sampling = attempt.sampling
    allowed = allowed_candidates(table.logprobs, table.unlisted_most, sampling)
    rivals = np.where(allowed.certain, table.logprobs, -np.inf)
    chosen = table.chosen_logprobs
    if not sampling.greedy:
        ids = np.concatenate([table.ids, table.chosen_ids[:, None]], axis=1)
        noise = candidate_noise(attempt.sampler_profile, sampling.seed, len(attempt.prompt_ids), ids)
        noise *= sampling.temperature
        rivals, chosen = rivals + noise[:, :-1], chosen + noise[:, -1]
    best = rivals.max(axis=1, initial=-np.inf)
    lost = np.maximum(best - chosen, 0.0)
    # An id from below the cut loses at least the distance to it, however lucky its noise.
    return np.maximum(lost, allowed.cutoff - table.chosen_logprobs), best


def _draws_as_the_model_says(sampling: Sampling) -> bool:
    return sampling.temperature == 1.0 and sampling.top_k == 0 and sampling.top_p == 1.0 and not sampling.penalised


def _failures_of_draws(attempt: Attempt, table: _Table, margins: Floats) -> list[HardFailure]:
    found = []
    allowed = allowed_candidates(table.logprobs, table.unlisted_most, attempt.sampling)
    below_cut = allowed.clearly_excluded(table.chosen_logprobs)
    impossible = (margins > HARD_MARGIN) & (table.chosen_ranks > HARD_RANK)
    last = len(margins) - 1
    ends = attempt.finish_reason is FinishReason.STOP and attempt.output_ids[-1] in attempt.stop_token_ids
    for index in np.flatnonzero(below_cut | impossible | (margins > STOP_MARGIN)).tolist():
        nats = float(margins[index])
        if ends and index == last:
            found.append(HardFailure(FailureKind.FALSE_STOP, index, nats))
        elif below_cut[index]:
            found.append(HardFailure(FailureKind.EXCLUDED_ID, index, nats))
        elif impossible[index]:
            found.append(HardFailure(FailureKind.IMPOSSIBLE_ID, index, nats))
    return found


def _penalised(attempt: Attempt, ids: NDArray[np.uint64], logprobs: Floats, chosen: Floats) -> tuple[Floats, Floats]:
    """Apply presence and frequency penalties, which count the output before each position."""
    sampling = attempt.sampling
    logprobs, chosen = logprobs.copy(), chosen.copy()
    counts: dict[int, int] = {}
    for line, output_id in enumerate(attempt.output_ids):
        for column, candidate in enumerate(ids[line].tolist()):
            if count := counts.get(candidate):
                logprobs[line, column] -= sampling.frequency_penalty * count + sampling.presence_penalty
        if count := counts.get(output_id):
            chosen[line] -= sampling.frequency_penalty * count + sampling.presence_penalty
        counts[output_id] = counts.get(output_id, 0) + 1
    return logprobs, chosen
