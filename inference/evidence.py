"""How strongly re-scored output speaks against a node: a bet against its honesty. Pure.

The squares of honest output's clipped margins have a mean of at most a bound
that was measured (`Calibration`). A gambler who holds that for true, and bets
on more whenever a block of tokens is checked, wins nothing in the long run: its
capital is a nonnegative supermartingale. By Ville's inequality it reaches 100
times its start with probability 1/100 at most, however often one looks, so its
logarithm is evidence that may be added up over blocks, attempts and days and
compared with ln 100 at any time (Waudby-Smith & Ramdas 2023, "Estimating means
of bounded random variables by betting").

Squares, because rounding makes many small margins and a changed model fewer and
larger ones: for 8-bit weights against bf16 the means differ by a factor of 2.7,
the mean squares by 4.7.

Several gamblers stake different shares, as a large stake finds a gross cheat
within a few blocks and a small one a slight cheat within thousands of tokens.
The mean of their capitals is a supermartingale again.

At temperature 1 there is a second bet, on how many ids are drawn from outside
the list of candidates: the chance of each is known, whatever the model
(`Rescored.unlisted_rates`). Some gamblers hold a part of that for the truth,
which a lower temperature makes it, some a multiple, most none. They bet first
on whether an id is listed, then on its margin; honest ids from outside the list
have smaller margins than listed ones, on which the bound is measured.

A bet on margins is made on the mean of a block, not on a token: the margins of neighbours
depend on each other. What is left over at the end of an attempt is a smaller
bet, on a block that counts for its share.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from inference.rescoring import Rescored

if TYPE_CHECKING:
    # Its module reads files, which verdicts, that add evidence up, must not be able to.
    from inference.calibration import Calibration

# Where evidence is called an alarm: false alarms stay below 1 in 100 nodes, over all time.
ALARM: Final = math.log(100.0)
# What one failure adds that no honest engine makes. A rule, not a bet: no such failure was seen in any honest token
# on record (docs/verification.md), so its rate under honesty is not measured but bounded.
HARD_FAILURE_EVIDENCE: Final = math.log(100.0)
# What the gamblers hold for the rate of ids from outside the list, in units of the honest one, and how the capital is
# shared between them. Measured at temperature 0.9 for 1.0: 0.68 of them.
UNLISTED_MULTIPLES: Final = (1.0, 0.6, 1.6)
UNLISTED_SHARES: Final = (0.6, 0.3, 0.1)
# Below it a ratio of two chances is the ratio of their rates, to 12 digits.
RATE_MIN: Final = 1e-12


def log_capitals(rescored: Rescored, calibration: "Calibration") -> tuple[float, ...]:
    """Return the logarithm of what each gambler makes of an attempt, hard failures included.

    Add them up over a node's attempts, gambler by gambler, and ask `combined`: that keeps the whole power over many
    attempts. Zeros where nothing could be measured.
    """
    penalty = HARD_FAILURE_EVIDENCE * len(rescored.failures)
    bound = calibration.bound(rescored.temperature)
    size = calibration.block_tokens
    starts = range(0, len(rescored.margins), size)
    # How much each block has above an honest block's mean, in units of that mean; -1 without any margin.
    excess = [sum(m * m / bound - 1.0 for m in rescored.margins[start : start + size]) / size for start in starts]
    margins = [sum(math.log1p(stake * above) for above in excess) for stake in calibration.stakes]
    unlisted = [_unlisted_bet(rescored, multiple) for multiple in UNLISTED_MULTIPLES]
    return tuple(penalty + first + second for first in unlisted for second in margins)


def _unlisted_bet(rescored: Rescored, multiple: float) -> float:
    """Return the logarithm of a likelihood ratio: ids from outside the list at a multiple of their rate, or at it."""
    if multiple == 1.0 or not rescored.unlisted_rates:
        return 0.0
    total = 0.0
    for rate, unlisted in zip(rescored.unlisted_rates, rescored.unlisted, strict=True):
        if not unlisted:
            total += (1.0 - multiple) * rate
        elif rate < RATE_MIN:
            total += math.log(multiple)
        else:
            total += math.log(math.expm1(-multiple * rate) / math.expm1(-rate))
    return total


def combined(capitals: Sequence[float]) -> float:
    """Return the logarithm of the gamblers' whole capital, each having started with its share: the evidence.

    Of one gambler that is its own.
    """
    if len(capitals) == 1:
        return capitals[0]
    stakes = len(capitals) // len(UNLISTED_SHARES)
    shares = [share / stakes for share in UNLISTED_SHARES for _ in range(stakes)]
    largest = max(capitals)
    return largest + math.log(
        sum(share * math.exp(capital - largest) for share, capital in zip(shares, capitals, strict=True))
    )


def log_evidence(rescored: Rescored, calibration: "Calibration") -> float:
    """Return the evidence of one attempt against honesty, in nats; negative where it speaks for it.

    May be added up over attempts. Adding `log_capitals` instead and combining at the end has more power.
    """
    return combined(log_capitals(rescored, calibration))
