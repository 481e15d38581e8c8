"""How a person sees the status of an agent: tables for a terminal."""

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent.energy.status import credits_lines, energy_lines
from agent.owner.asks import terms_line
from agent.owner.presence import span_in_words

_COLOURS = {
    "lent": "green",
    "ready": "green",
    "given_back": "cyan",
    "giving_back": "yellow",
    "starting": "yellow",
    "unloaded": "cyan",
    "quarantined": "bold red",
    "failed": "bold red",
}


def render_status(status: dict[str, Any], now_ms: int) -> RenderableType:
    """Return cards, engines and connection of what `agent.status.read_status` returned."""
    energy = Text("\n".join([*energy_lines(status["energy"]), *credits_lines(status["credits"])]))
    return Group(
        _head(status, now_ms),
        *_ledger(status),
        _cards(status, now_ms),
        _engines(status),
        *_terms(status),
        *_fetches(status),
        energy,
    )


def _head(status: dict[str, Any], now_ms: int) -> Text:
    link = "connected" if status["connected"] else "not connected to the coordinator"
    head = Text(f"node {status['node_id']}, pid {status['pid']}: {link}")
    if status["results_waiting"] and not status["connected"]:
        head.append(f", {status['results_waiting']} finished results wait for it", style="yellow")
    if status["draining"]:
        head.append(", draining: no new work is taken", style="yellow")
    pause = status["pause"]
    if pause["paused"] and (pause["until_ms"] is None or pause["until_ms"] > now_ms):
        left = "" if pause["until_ms"] is None else f" for {span_in_words((pause['until_ms'] - now_ms) / 1000)} more"
        head.append(f", paused by you{left}", style="yellow")
    return head


def _ledger(status: dict[str, Any]) -> list[RenderableType]:
    """Return nothing for a ledger that only grew, as it should."""
    ledger = status["ledger"]
    if not ledger["refused"]:
        return []
    what = f"the coordinator's ledger was rewritten ({ledger['refused']}): no new work is taken"
    return [Text(f"{what}; {ledger['detail']}; what it signed is kept in {ledger['evidence']}", style="bold red")]


def _cards(status: dict[str, Any], now_ms: int) -> Table:
    table = _table("card", "is", "since", "because", "power cap")
    for card in status["cards"]:
        reason = card["reason"].removeprefix("lent: ")
        if card["giveback_ms"] is not None:
            reason = f"{reason} (last give-back took {card['giveback_ms'] / 1000:.1f} s)"
        since = span_in_words((now_ms - card["since_ms"]) / 1000)
        cap = _cap(status["power"].get(card["card"]))
        table.add_row(_plain(card["card"]), _state(card["state"]), since, _plain(reason), _plain(cap))
    return table


def _cap(power: dict[str, Any] | None) -> str:
    if power is None:
        return ""
    parts = []
    if power["cap_w"] is not None:
        parts.append(f"{power['cap_w']:.0f} W, yours is {power['original_w']:.0f} W")
    if power["note"]:
        parts.append(power["note"])
    if power["sequences_share"] < 1:
        parts.append(f"{power['sequences_share']:.0%} of the answers at once instead")
    return "; ".join(parts)


def _fetches(status: dict[str, Any]) -> list[RenderableType]:
    return [
        Text(
            f"model {fetch['name']}: {fetch['phase'].replace('_', ' ')}, "
            f"{fetch['bytes_done'] / 1e9:.2f} of {fetch['bytes_total'] / 1e9:.2f} GB, "
            f"{fetch['rate_bytes_per_s'] / 1e6:.1f} MB/s{': ' + fetch['detail'] if fetch['detail'] else ''}"
        )
        for fetch in status["fetches"]
    ]


def _engines(status: dict[str, Any]) -> Table:
    table = _table("engine", "kind", "model", "is", "answers", "tokens/s", "note")
    for engine in status["engines"]:
        fence = "" if engine["fenced"] or not engine["pid"] else "unfenced"
        note = "; ".join(filter(None, (fence, engine["note"])))
        table.add_row(
            _plain(engine["engine_id"]),
            engine["kind"],
            _plain(engine["model"]),
            _state(engine["status"]),
            f"{engine['running']} of {engine['slots']}",
            f"{engine['tokens_per_second']:.0f}",
            _plain(note),
        )
    return table


def _terms(status: dict[str, Any]) -> list[RenderableType]:
    lines = ((terms_line(engine), engine["terms"]) for engine in status["engines"])
    return [Text(line, style="" if terms["ask"] else "bold yellow") for line, terms in lines if line is not None]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _state(state: str) -> Text:
    return Text(state.replace("_", " "), style=_COLOURS.get(state, ""))


def _plain(text: str) -> Text:
    # Names of programs and models are no markup.
    return Text(text)
