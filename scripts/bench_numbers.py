"""Figures that every benchmark computes alike."""

from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of an ordered row lies, to a tenth; 0 for an empty row."""
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1) if ordered else 0.0
