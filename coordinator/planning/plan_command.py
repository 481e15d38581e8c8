"""The command `slackwater-coordinator plan`: reads files, shows progress, prints the plan."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from coordinator.planning.catalog import read_prices
from coordinator.planning.curve_file import read_curves
from coordinator.planning.optimise import NoPlan, SolverFailed, SolverMissing
from coordinator.planning.plan import Plan, Progress, make_plan
from coordinator.planning.plan_check import LoadCheck, check_plan
from coordinator.planning.plan_input import read_plan_input
from coordinator.planning.plan_plots import write_plan_plots
from coordinator.planning.plan_report import plan_to_json, print_plan
from coordinator.planning.toml_table import InputInvalid
from coordinator.startup import ExitCode, StartupError, describe_os_error

PLAN_EPILOG = escape("""An example, day.toml:

\b
headroom = 1.25                         # capacity over load
[[load]]
model = "DeepSeek-R1-Distill-Qwen-7B"   # one with a fitted curve
class = "interactive"                   # or "standard", "batch"
requests_per_second = 12.0
prompt_tokens = 208                     # means
answer_tokens = 208
first_token_ms = 500                    # targets: these three may be
token_ms = 50                           # left out, each class has
quantile = 0.99                         # defaults
unfitted_first_token = false            # engines whose first tokens no curve tells
[cards_max]                             # optional: cards that can be had
RTX-4090 = 16
[churn.RTX-4090]                        # optional: how machines get lost
losses_per_hour = 0.011

Then `slackwater-coordinator plan day.toml`, or with `--json` for programs. docs/planning.md has method and limits.
""")


def plan_fleet(input_path: Path, prices_path: Path, as_json: bool, plots: Path | None) -> None:
    """Read the question, answer it, check the answer by simulation, and print both.

    Raises:
        StartupError: a file is wrong, no fleet serves the load, scipy is missing, or the charts cannot be written.
    """
    made, checks = _plan(input_path, prices_path)
    if as_json:
        sys.stdout.write(json.dumps(plan_to_json(made, checks)) + "\n")
    else:
        print_plan(made, checks, Console())
    if plots is not None:
        try:
            written = write_plan_plots(made, plots)
        except OSError as error:
            raise describe_os_error(error, f"write charts to {plots}") from error
        sys.stderr.write("".join(f"wrote {path}\n" for path in written))


def _plan(input_path: Path, prices_path: Path) -> tuple[Plan, tuple[LoadCheck, ...]]:
    try:
        prices = read_prices(prices_path)
        curves = read_curves()
        asked = read_plan_input(input_path, {of.model for of in curves}, prices.cards)
        with _shown_progress() as progress:
            made = make_plan(asked, prices, curves, progress)
            return made, check_plan(made, curves, progress)
    except InputInvalid as error:
        raise StartupError(ExitCode.BAD_CONFIG, str(error)) from error
    except (NoPlan, SolverFailed) as error:
        raise StartupError(ExitCode.BAD_DATA, str(error)) from error
    except SolverMissing as error:
        raise StartupError(ExitCode.UNAVAILABLE, str(error)) from error


@contextmanager
def _shown_progress() -> Iterator[Progress]:
    """Say on a terminal's standard error what is being done; nothing remains of it, and pipes see nothing."""
    with Console(stderr=True).status("planning") as status:
        yield lambda what: status.update(f"planning: {what}")
