"""Commands of an owner who wants the machine back, or not: pause, resume, drain.

They write a file, so they need no network and no running agent; where one runs,
they wait a moment for what it made of it.
"""

import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer

from agent.cli.options import CONFIG_DEFAULT, ConfigOption, one_line_errors
from agent.clock import monotonic_s, wall_ms
from agent.config import load_config
from agent.errors import DiskFailed, NotConfirmed, NothingTold, NotRunning
from agent.owner.pause import Pause, parse_pause_end, pause_to_change, write_pause
from agent.status import read_status

# The agent sees the file within 0.1 s, a card is free within 2 s, and a busy machine takes its time.
CONFIRM_S_MAX = 5.0
CONFIRM_POLL_S = 0.02

# How a card is called that is still on its way back, or will not come.
_NOT_FREE = ("lent", "giving_back", "quarantined")


def pause(
    when: Annotated[
        list[str] | None, typer.Argument(help='"for 2h", "for 90m" or "until 18:00"; nothing: until resume.')
    ] = None,
    config: ConfigOption = CONFIG_DEFAULT,
) -> None:
    """Take this machine back at once: running answers move to other machines."""
    with one_line_errors():
        now_ms = wall_ms()
        until_ms = parse_pause_end(when or [], now_ms)
        end = "until you resume" if until_ms is None else f"until {_clock(until_ms, now_ms)}"

        def confirmed(status: dict[str, Any]) -> bool:
            return all(card["state"] not in ("lent", "giving_back") for card in status["cards"])

        _ask(
            config,
            lambda before: Pause(paused=True, until_ms=until_ms, draining=before.draining, asked_at_ms=now_ms),
            confirmed,
            lambda status, waited_s: f"paused {end}; {_free(status, waited_s)}",
            f"paused {end}; no agent runs here, it will hold at the next start",
        )


def resume(config: ConfigOption = CONFIG_DEFAULT) -> None:
    """End a pause or a drain, and every wait after an earlier return."""
    with one_line_errors():
        now_ms = wall_ms()
        _ask(
            config,
            lambda before: Pause(asked_at_ms=now_ms),
            lambda status: True,
            lambda status, waited_s: "\n".join(["resumed", *(_standing(card) for card in status["cards"])]),
            "resumed; no agent runs here",
        )


def drain(config: ConfigOption = CONFIG_DEFAULT) -> None:
    """Take no new work; what runs may end. `resume` ends it."""
    with one_line_errors():
        now_ms = wall_ms()

        def told(status: dict[str, Any], waited_s: float) -> str:
            running = sum(engine["running"] for engine in status["engines"])
            return f"draining: no new work is taken, {running} answers still run"

        _ask(
            config,
            lambda before: msgspec.structs.replace(before, draining=True, asked_at_ms=now_ms),
            lambda status: bool(status["draining"]),
            told,
            "draining; no agent runs here, it will hold at the next start",
        )


def _ask(
    config: Any,
    change: Callable[[Pause], Pause],
    confirmed: Callable[[dict[str, Any]], bool],
    told: Callable[[dict[str, Any], float], str],
    nobody: str,
) -> None:
    """Write what the owner wants, and print what the running agent, if any, made of it.

    Raises:
        NotConfirmed: an agent runs and did not follow in time.
        DiskFailed: the file cannot be written.
    """
    state_dir = load_config(config).state_dir
    began_at = monotonic_s()
    try:
        wanted = change(pause_to_change(state_dir))
        write_pause(wanted, state_dir)
    except OSError as error:
        raise DiskFailed(f"cannot write into {state_dir}: {error.strerror}; is this your agent? try sudo") from error
    while True:
        waited_s = monotonic_s() - began_at
        try:
            status = read_status(state_dir)
        except NothingTold as error:
            # It starts, or will write its status anew in a moment.
            cards = str(error)
        except NotRunning:
            print(nobody)
            return
        else:
            if status["pause"]["asked_at_ms"] == wanted.asked_at_ms and confirmed(status):
                print(told(status, waited_s))
                return
            cards = "; ".join(_standing(card).strip() for card in status["cards"] if card["state"] in _NOT_FREE)
        if waited_s > CONFIRM_S_MAX:
            raise NotConfirmed(
                f"written, but the agent did not follow within {CONFIRM_S_MAX:g} s: {cards or 'no word'}; "
                f"see `slackwater-agent logs`"
            )
        time.sleep(CONFIRM_POLL_S)


def _free(status: dict[str, Any], waited_s: float) -> str:
    held = [card for card in status["cards"] if card["state"] == "quarantined"]
    if held:
        return "; ".join(f"card {card['card']} is not free: {card['reason']}" for card in held)
    count = len(status["cards"])
    return f"{'the card is' if count == 1 else f'{count} cards are'} free after {waited_s:.1f} s"


def _standing(card: dict[str, Any]) -> str:
    reason = card["reason"].removeprefix("lent: ")
    return f"  {card['card']}: {card['state'].replace('_', ' ')}: {reason}"


def _clock(at_ms: int, now_ms: int) -> str:
    at = datetime.fromtimestamp(at_ms / 1000)
    return at.strftime("%H:%M" if at_ms - now_ms < 24 * 3600 * 1000 else "%Y-%m-%d %H:%M")
