"""What the owners would ask at the least for the work of a run, by a linear program that knows every request.

x[r, k] is the share of request r that engines of kind k answer:

    minimise    sum of ask(r, k) * x[r, k]
    so that     sum over k of x[r, k] = 1                          for each request
                sum over r of slots_ms(r, k) * x[r, k] <= lent(k)  for each kind
                sum over r of memory_ms(r, k) * x[r, k] <= lent(k) for each kind
                x[r, k] = 0  where somebody reads r as it comes, and k is too slow for that even with nothing else to do

Why no router that answers every request, in target, is asked for less:

- Whoever answers r wholly on kind k is asked for its prompt and its answer by k, once at the least. Failed and doubled
  attempts only add to that.
- A step takes base + sequence * answers + kv_token * context, and each token of a prompt that it computes adds to it.
  Of the last three r causes its own part, whatever it shares a step with. The base is shared by `slots` answers at the
  most, so each step for a token of r costs base / slots at the least: `slots_ms`. And it is shared by answers whose
  contexts fill the memory at the most, so it costs base * context / memory at the least: `memory_ms`. Sums of either
  over all that ran on a kind are no more than the time that its engines were there.
- When requests come and in which order, that nodes are single, and that nobody knows how long an answer gets: all that
  is left out, which can only lower the minimum, as does leaving out that a request is not divided.

An answer that moves in its middle is read again where it goes on, and asked for again; no router here moves one that
was not lost. Doing that on purpose, so that long contexts are on one kind and short ones on another, is not covered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.ledger.prices import TOKENS_PER_PRICE, Price
from coordinator.planning.curves import EngineCurve
from coordinator.planning.optimise import SolverFailed, SolverMissing
from coordinator.planning.simulation.scenario import Target

_SOLVED: Final = 0
_INFEASIBLE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Equal engines.

    Args:
        slots: answers at once on each.
        lent_ms: for how long they were there, all together.
    """

    curve: EngineCurve
    slots: int
    ask: Price
    lent_ms: float


@dataclass(frozen=True, slots=True)
class Requests:
    """Columns, one row a request. Args: `read` says whose targets count."""

    prompt_tokens: NDArray[np.float64]
    answer_tokens: NDArray[np.float64]
    read: NDArray[np.bool_]

    @property
    def context_tokens(self) -> NDArray[np.float64]:
        """Tokens in front of each token of the answer, added up."""
        answer = self.answer_tokens
        return self.prompt_tokens * answer + answer * (answer - 1.0) / 2.0


def least_asked_micro(requests: Requests, kinds: Sequence[Kind], target: Target) -> float | None:
    """Return micro-credits, or None where no router answers all of them in that time.

    Args:
        target: of the requests that are read.

    Raises:
        SolverMissing: scipy is not installed.
        SolverFailed: it gave up.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError as error:
        raise SolverMissing(
            "the bound needs scipy; install it with: pip install 'slackwater-network[planning]'"
        ) from error
    count = len(requests.read)
    if not count:
        return 0.0
    costs = np.concatenate([_asked_micro(requests, kind) for kind in kinds])
    most = np.concatenate([np.where(_able(requests, kind, target), 1.0, 0.0) for kind in kinds])
    columns = np.arange(count * len(kinds))
    whole = csr_array((np.ones(len(columns)), (columns % count, columns)))
    used = np.concatenate([one for kind in kinds for one in _used_ms(requests, kind)])
    # Rows 2 k and 2 k + 1 are those of kind k, and its columns stand together.
    rows = np.repeat(np.arange(2 * len(kinds)), count)
    times = csr_array((used, (rows, np.concatenate([columns.reshape(len(kinds), count)] * 2, axis=1).ravel())))
    lent = np.repeat([kind.lent_ms for kind in kinds], 2)
    result = linprog(
        costs, A_ub=times, b_ub=lent, A_eq=whole, b_eq=np.ones(count), bounds=np.column_stack([0.0 * most, most])
    )
    if result.status == _INFEASIBLE:
        return None
    if result.status != _SOLVED:
        raise SolverFailed(f"the solver found no bound: {result.message}")
    return float(result.fun)


def full_load_ask(
    curve: EngineCurve, slots: int, usd_per_hour: float, prompts: Sequence[int], answers: Sequence[int], micro: float
) -> Price:
    """Return the ask at which a node with all its slots taken earns so much an hour; see capacity.py.

    Reading and writing are paid by the time that they take.

    Args:
        micro: micro-credits to the dollar.
    """
    held = fmean(prompts) + fmean(answer**2 for answer in answers) / (2.0 * fmean(answers))
    batch = max(1, min(slots, int(curve.kv_tokens_max / held)))
    per_ms = micro * usd_per_hour / 3_600_000.0
    return Price(
        round(TOKENS_PER_PRICE * per_ms * curve.prefill_token_ms),
        round(TOKENS_PER_PRICE * per_ms * curve.step_ms(batch, batch * held) / batch),
    )


def _asked_micro(requests: Requests, kind: Kind) -> NDArray[np.float64]:
    scaled = requests.prompt_tokens * kind.ask.prompt_micro + requests.answer_tokens * kind.ask.completion_micro
    return np.floor(scaled / TOKENS_PER_PRICE)


def _able(requests: Requests, kind: Kind, target: Target) -> NDArray[np.bool_]:
    """Return who could be answered in target by an engine with nothing else to do; the network is left out."""
    curve = kind.curve
    first_ms = curve.request_ms + curve.prefill_token_ms * requests.prompt_tokens + curve.step_base_ms
    token_ms = curve.step_base_ms + curve.step_sequence_ms + curve.step_kv_token_ms * requests.prompt_tokens
    in_time = np.ones(len(requests.read), dtype=np.bool_)
    if target.first_token_ms is not None:
        in_time &= first_ms <= target.first_token_ms
    if target.token_ms is not None:
        in_time &= (token_ms <= target.token_ms) | (requests.answer_tokens <= 1.0)
    return in_time | ~requests.read


def _used_ms(requests: Requests, kind: Kind) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least engine time that each request takes: by slots, and by memory."""
    curve, answer, context = kind.curve, requests.answer_tokens, requests.context_tokens
    own_ms = curve.prefill_token_ms * requests.prompt_tokens + curve.step_sequence_ms * answer
    own_ms = own_ms + curve.step_kv_token_ms * context
    slots = min(kind.slots, curve.slots_max)
    return own_ms + curve.step_base_ms * answer / slots, own_ms + curve.step_base_ms * context / curve.kv_tokens_max
