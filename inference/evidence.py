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

A bet is made on the mean of a block, not on a token: the margins of neighbours
depend on each other. What is left over at the end of an attempt is a smaller
bet, on a block that counts for its share.
"""

import math
from collections.abc import Sequence
from typing import Final

from inference.calibration import Calibration
from inference.rescoring import Rescored

# Where evidence is called an alarm: false alarms stay below 1 in 100 nodes, over all time.
ALARM: Final = math.log(100.0)
# What one failure adds that no honest engine makes. A rule, not a bet: no such failure was seen in any honest token
# on record (docs/verification.md), so its rate under honesty is not measured but bounded.
HARD_FAILURE_EVIDENCE: Final = math.log(100.0)


def log_capitals(rescored: Rescored, calibration: Calibration) -> tuple[float, ...]:
    """Return the logarithm of what each of the calibration's gamblers makes of an attempt, hard failures included.

    Add them up over a node's attempts, gambler by gambler, and ask `combined`: that keeps the whole power over many
    attempts. Zeros where nothing could be measured.
    """
    penalty = HARD_FAILURE_EVIDENCE * len(rescored.failures)
    bound = calibration.bound(rescored.temperature)
    size = calibration.block_tokens
    starts = range(0, len(rescored.margins), size)
    # How much each block has above an honest block's mean, in units of that mean; -1 without any margin.
    excess = [sum(m * m / bound - 1.0 for m in rescored.margins[start : start + size]) / size for start in starts]
    return tuple(penalty + sum(math.log1p(stake * above) for above in excess) for stake in calibration.stakes)


def combined(capitals: Sequence[float]) -> float:
    """Return the logarithm of the gamblers' mean capital: the evidence."""
    largest = max(capitals)
    return largest + math.log(sum(math.exp(capital - largest) for capital in capitals) / len(capitals))


def log_evidence(rescored: Rescored, calibration: Calibration) -> float:
    """Return the evidence of one attempt against honesty, in nats; negative where it speaks for it.

    May be added up over attempts. Adding `log_capitals` instead and combining at the end has more power.
    """
    return combined(log_capitals(rescored, calibration))
