"""Run the fleet simulation over many seeds, or one again: `simulate.py --seeds 10000`, `simulate.py --seed 330`."""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "simulation"))

from simulated_fleet import Fleet, Report, simulate

BATCH = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many seeds, from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one alone and let it raise")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.seed is not None:
        Fleet(options.seed).run()
        print(f"seed {options.seed} holds")
        return
    end = options.first + options.seeds
    batches = [range(start, min(start + BATCH, end)) for start in range(options.first, end, BATCH)]
    report = Report()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for part in pool.map(simulate, batches):
            report += part
            print(f"\r{report.seeds} of {options.seeds} seeds, {len(report.failures)} failed", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(report.table())
    if report.failures:
        sys.exit("\n".join(report.failures))


if __name__ == "__main__":
    main()
