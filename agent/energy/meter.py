"""How many joules each task took, and by what method that is known. Pure.

Theory of operation. The driver samples the cards every few seconds. From one
sample to the next a card is in a *window*; `agent.energy.card` says how many
joules it drew in there and by which method. A window's joules are split over
the tasks that ran in it, by the tokens they generated plus a tenth of the
prompt tokens they brought, but none gets more than the card drew while the task
was there: an attribution, since a card does not know tasks. Shares are whole
millijoules and add up to the window's exactly. What a card drew while no task
ran is idle and is nobody's.

A task ends in the middle of a window, and its statement does not wait for the
next sample. Its part of the open window is extrapolated from the power that
the card drew when it last worked. When the window closes, each task's share of
it is known; what the ended ones were charged too much or too little is kept as
`correction_mj`, so that

    sum over tasks + correction_mj == sum over windows, to the millijoule.

The method of a task is the weakest of its windows'. An extrapolated end counts
as integrated power, unless it is a small part of a task that the counter
measured. With the method NONE the figure is 0.

Accuracy. These are joules of the cards: processor, memory, fans and power
supply come on top. A100 and H100 sample their power during a quarter of the
time only (arXiv:2312.02741), and the counter advances in steps, so that short
windows read 0 (ml-energy/zeus#12, where counter and polling agree within 1 %
over long ones). So windows are `WINDOW_S_MIN` or longer.

No token costs anything here: whoever calls hands in how many tokens each
running task has generated so far.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.assignments import AttemptKey
from agent.energy.card import WINDOW_S_MAX, CardEnergy, CardSample, EnergyMethod, Window, apportion, weaker

# A generated token weighs as much as this many prompt tokens. A prompt goes through a card at a hundred times the
# speed of a single answer (6 x RTX 3090 at 350 W: 9893 against 72.6 tokens/s, llmgarage.ai/power-limit-tokens-per-
# second-benchmark), while some ten answers at once share what the single one costs (Llama 3.1 8B on an H100:
# 0.455 J/token at 8 sequences, 0.070 at 512, ML.ENERGY leaderboard). Answers dominate what a task takes, prompts
# hardly show (arXiv:2407.16893, arXiv:2602.05712).
PROMPT_TOKENS_PER_GENERATED = 10
# The extrapolated end of a task that the counter measured may be this part of it: with windows of 5 s, tasks
# of 25 s and longer carry the method COUNTER.
TAIL_PARTS_MIN = 5


@dataclass(frozen=True, slots=True)
class CarbonIntensity:
    """Grams of CO2 equivalent per kWh, and where the figure is from, in words."""

    grams_per_kwh: float
    label: str


class TaskEnergy(NamedTuple):
    """What an attempt took: 0 with the method NONE."""

    energy_mj: int
    method: EnergyMethod


NO_ENERGY = TaskEnergy(0, EnergyMethod.NONE)


@dataclass(frozen=True, slots=True)
class WorkRate:
    """What generated tokens cost over one window.

    Args:
        concurrency: tasks at once, on average. It moves joules per token more than anything else, so it goes with it.
    """

    joules_per_token: float
    concurrency: float
    method: EnergyMethod


@dataclass(frozen=True, slots=True)
class CardFigures:
    """How a card does, for people.

    Args:
        watts: of the newest reading or window; None where nothing is known.
        rate: of the newest window in which tokens were generated.
    """

    card: str
    watts: float | None
    rate: WorkRate | None


@dataclass(slots=True)
class EnergyTotals:
    """What all cards drew since the meter was made.

    Args:
        work_mj: while tasks ran, by method.
        idle_mj: while an engine of ours held a card and no task ran.
        unlent_mj: while no engine of ours held the card: the owner's own use.
        correction_mj: charged to tasks too little (positive) or too much (negative) by extrapolation.
        unmeasured_s: card seconds in which tasks ran and nothing is known.
    """

    work_mj: Counter[EnergyMethod] = field(default_factory=Counter)
    idle_mj: int = 0
    unlent_mj: int = 0
    correction_mj: int = 0
    unmeasured_s: float = 0.0


class _Share:
    """One task on one card, in the open window."""

    __slots__ = ("counted", "prompt_tokens", "since")

    def __init__(self, prompt_tokens: int, now: float) -> None:
        # Generated tokens that earlier windows have accounted for.
        self.counted = 0
        # They weigh in every window until the answer begins: a long prefill goes on for several.
        self.prompt_tokens = prompt_tokens
        # When it began, or the window was opened.
        self.since = now

    def weight(self, generated: int) -> int:
        # At least 1, so that a task that is still in its prefill has a part in a window that nobody else ran in.
        return max(1, PROMPT_TOKENS_PER_GENERATED * (generated - self.counted) + self.prompt_tokens)

    def account(self, generated: int, now: float) -> int:
        """Begin another window; return the tokens generated in the one that ends."""
        tokens, self.counted, self.since = generated - self.counted, generated, now
        if generated:
            self.prompt_tokens = 0
        return tokens


class _Task:
    __slots__ = ("cards", "energy_mj", "method")

    def __init__(self, cards: Sequence[str]) -> None:
        self.cards = cards
        self.energy_mj = 0
        self.method: EnergyMethod | None = None

    def charge(self, energy_mj: int, method: EnergyMethod) -> None:
        self.energy_mj += energy_mj
        self.method = method if self.method is None else weaker(self.method, method)


class _Card:
    __slots__ = ("ended_mj", "ended_s", "ended_tokens", "ended_weight", "energy", "held", "live", "rate")

    def __init__(self, energy: CardEnergy) -> None:
        self.energy = energy
        self.held = False
        self.live: dict[AttemptKey, _Share] = {}
        # Of tasks that ended in the open window: how long they were there, generated tokens, weight, and what they
        # were charged for it.
        self.ended_s = 0.0
        self.ended_tokens = 0
        self.ended_weight = 0
        self.ended_mj = 0
        self.rate: WorkRate | None = None

    def leave(self, key: AttemptKey, generated: Mapping[AttemptKey, int], now: float) -> tuple[int, EnergyMethod]:
        """Take a task off the card; return what it took of the open window."""
        drawn_mj, method = self.energy.extrapolate(now)
        weights = _weights(self, generated)
        weight = weights.pop(key)
        others_weight = sum(weights.values()) + self.ended_weight
        share = self.live.pop(key)
        there_s = now - share.since
        charged_mj = drawn_mj * weight // (weight + others_weight)
        most_mj = math.ceil(drawn_mj * there_s / self.energy.work_s) if there_s else 0
        if charged_mj > most_mj:
            # It weighs as much as gives it this part, so that the others' parts of the window are not too small.
            charged_mj = most_mj
            weight = others_weight * charged_mj // (drawn_mj - charged_mj)
        self.ended_s += there_s
        self.ended_tokens += share.account(generated.get(key, share.counted), now)
        self.ended_weight += weight
        self.ended_mj += charged_mj
        self.energy.running_changed(len(self.live), now)
        return charged_mj, method

    def split(self, window: Window, generated: Mapping[AttemptKey, int], now: float) -> tuple[list[int], int]:
        """Return the shares of the tasks that run, in their order, and that of those that ended."""
        weights = [*_weights(self, generated).values(), self.ended_weight]
        if window.work_s == 0:
            return [0] * len(self.live), 0
        there_s = [*(now - share.since for share in self.live.values()), self.ended_s]
        most_mj = [math.ceil(window.work_mj * seconds / window.work_s) for seconds in there_s]
        *shares, ended_mj = apportion(window.work_mj, weights, most_mj)
        return shares, ended_mj


class EnergyMeter:
    """Joules of tasks on this node's cards.

    Args:
        tdp_w: watts under load by card, for cards that tell nothing.
    """

    def __init__(self, tdp_w: Mapping[str, float]) -> None:
        self._tdp_w = tdp_w
        self._cards: dict[str, _Card] = {}
        self._tasks: dict[AttemptKey, _Task] = {}
        self.totals = EnergyTotals()

    def follow(self, tdp_w: Mapping[str, float]) -> None:
        """Take the owner's other figures, from the windows on that are open now."""
        self._tdp_w = tdp_w
        for name, card in self._cards.items():
            card.energy.rated_w = tdp_w.get(name)

    def sampled(
        self, sample: CardSample, generated: Mapping[AttemptKey, int], now: float, *, held: bool = True
    ) -> None:
        """Take a reading of a card; closes a window where it is long enough.

        Args:
            generated: tokens that each running task has generated so far.
            held: an engine of ours holds the card.
        """
        card = self._card(sample.card, now)
        window = card.energy.sampled(sample, now)
        # An engine that left within the window drew what is idle in it.
        was_held, card.held = card.held, held
        if window is not None:
            self._close(card, window, generated, now, held=held or was_held)

    def began(
        self, key: AttemptKey, cards: Sequence[str], prompt_tokens: int, generated: Mapping[AttemptKey, int], now: float
    ) -> None:
        """Note that an engine has begun with a task."""
        self._tasks[key] = _Task(cards)
        for name in cards:
            card = self._card(name, now)
            self._lapse(card, generated, now)
            card.live[key] = _Share(prompt_tokens, now)
            card.energy.running_changed(len(card.live), now)

    def ended(self, key: AttemptKey, generated: Mapping[AttemptKey, int], now: float) -> TaskEnergy:
        """Note that a task runs no more, and return what it took; NO_ENERGY for one that never began.

        Args:
            generated: tokens of all running tasks and of this one.
        """
        task = self._tasks.get(key)
        if task is None:
            return NO_ENERGY
        tail_mj = 0
        for name in task.cards:
            card = self._cards[name]
            self._lapse(card, generated, now)
            charged_mj, method = card.leave(key, generated, now)
            tail_mj += charged_mj
            task.charge(charged_mj, method)
        del self._tasks[key]
        method = task.method or EnergyMethod.NONE
        if method is EnergyMethod.NONE:
            # Part of it is not known, so the whole is not; what is known was drawn all the same.
            self.totals.correction_mj += task.energy_mj
            return NO_ENERGY
        if method is EnergyMethod.COUNTER and tail_mj * TAIL_PARTS_MIN > task.energy_mj:
            method = EnergyMethod.INTEGRATED_POWER
        return TaskEnergy(task.energy_mj, method)

    @property
    def attempts(self) -> frozenset[AttemptKey]:
        """Those that run."""
        return frozenset(self._tasks)

    def figures(self) -> list[CardFigures]:
        """Return how every card does that was ever sampled or worked."""
        return [CardFigures(name, card.energy.watts, card.rate) for name, card in sorted(self._cards.items())]

    def _card(self, name: str, now: float) -> _Card:
        card = self._cards.get(name)
        if card is None:
            card = self._cards[name] = _Card(CardEnergy(self._tdp_w.get(name), now))
        return card

    def _lapse(self, card: _Card, generated: Mapping[AttemptKey, int], now: float) -> None:
        """Close a window that no sample has closed in time, so that its tasks do not share it with later ones."""
        if now - card.energy.opened_at > WINDOW_S_MAX:
            self._close(card, card.energy.lapsed(now), generated, now, held=card.held)

    def _close(
        self, card: _Card, window: Window, generated: Mapping[AttemptKey, int], now: float, *, held: bool
    ) -> None:
        shares, ended_mj = card.split(window, generated, now)
        tokens = card.ended_tokens
        for (key, share), share_mj in zip(card.live.items(), shares, strict=True):
            if now > share.since:
                self._tasks[key].charge(share_mj, window.method)
            tokens += share.account(generated.get(key, share.counted), now)
        self._add_up(window, ended_mj - card.ended_mj, held=held)
        if tokens and window.work_s > 0 and window.method is not EnergyMethod.NONE:
            concurrency = window.task_s / window.work_s
            card.rate = WorkRate(window.work_mj / tokens / 1000, concurrency, window.method)
        card.ended_tokens = card.ended_weight = card.ended_mj = 0
        card.ended_s = 0.0

    def _add_up(self, window: Window, correction_mj: int, *, held: bool) -> None:
        self.totals.correction_mj += correction_mj
        if held:
            self.totals.idle_mj += window.idle_mj
        else:
            self.totals.unlent_mj += window.idle_mj
        if window.method is EnergyMethod.NONE:
            self.totals.unmeasured_s += window.work_s
        else:
            self.totals.work_mj[window.method] += window.work_mj


def _weights(card: _Card, generated: Mapping[AttemptKey, int]) -> dict[AttemptKey, int]:
    return {key: share.weight(generated.get(key, share.counted)) for key, share in card.live.items()}
