"""Write docs/hybrid_fleets.md and its pictures: the benchmark paper's tables and claims, measured and simulated.

Running it twice changes no byte. Takes minutes on one core; what it does goes to standard error.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from coordinator.planning.paper.fleets import FLEETS, loads_of
from coordinator.planning.paper.pictures import pictures
from coordinator.planning.paper.report import report
from coordinator.planning.paper.study import Study, study

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"


def files(of: Study) -> Iterator[tuple[Path, str]]:
    """Yield each file of the report, with what belongs into it."""
    yield DOCS / "hybrid_fleets.md", report(of)
    for name, svg in pictures(of):
        yield DOCS / "images" / f"{name}.svg", svg


class Progress:
    """Says on standard error how far it is."""

    def __init__(self, steps: int) -> None:
        self._steps, self._begun = steps, 0

    def __call__(self, what: str) -> None:
        self._begun += 1
        print(f"{self._begun}/{self._steps} {what}", file=sys.stderr, flush=True)


def main() -> None:
    began = time.perf_counter()
    progress = Progress(1 + sum(len(loads_of(fleet)) for fleet in FLEETS))
    for path, text in files(study(FLEETS, progress)):
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(DOCS.parent))
    wall_s, cpu_s = time.perf_counter() - began, time.process_time()
    print(f"{wall_s:.0f} s, {cpu_s:.0f} s of them on a processor", file=sys.stderr)


if __name__ == "__main__":
    main()
