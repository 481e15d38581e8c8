"""Coming back to a coordinator that is gone: often enough, never in lockstep, for ever."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from agent.connection import BACKOFF_S_MAX, backoff_s

HOUR_S = 3600.0


def dials(seed: int) -> list[float]:
    """Return when an agent dials within the hour in which nobody answers."""
    jitter, now, times = random.Random(seed), 0.0, []
    while now < HOUR_S:
        times.append(now)
        now += backoff_s(len(times), jitter)
    return times


@given(st.integers())
def test_an_hour_without_a_coordinator_is_spent_dialling(seed: int) -> None:
    """Mutation seen to fail here: `2 ** failures` without its least (OverflowError after days, in a longer hour)."""
    times = dials(seed)
    assert HOUR_S / BACKOFF_S_MAX < len(times) < 1_000
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= BACKOFF_S_MAX
    assert 0 <= backoff_s(10**9, random.Random(seed)) <= BACKOFF_S_MAX


def test_a_fleet_does_not_come_back_in_lockstep() -> None:
    """A hundred agents lost the same coordinator at once. Mutation seen to fail here: a ceiling without jitter."""
    in_bins = [0] * 60
    for seed in range(100):
        for at in dials(seed):
            if 600 <= at < 660:
                in_bins[int(at - 600)] += 1
    # About 800 dials in that minute, 13 a second on average.
    assert max(in_bins) < 40
