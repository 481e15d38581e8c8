"""How listings look: tables for people, JSON for programs.

Names, notes and texts come from machines that nobody vouches for, so that
none of them reaches a terminal with its control characters.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slackwater.events import Model, Task
from slackwater.fleet import ApiKey, Engine, Gpu, LedgerAccount, MeasuredRate, Node, OpenEngine, Owner

# A pipe has no width; wide enough that no column is cut.
PIPE_COLUMNS = 200
# From here on the owner has a column of its own, and processors their full name.
WIDE_COLUMNS = 110
NONE = "-"
# Enough of an id for two of ten thousand random ones to be alike in one fleet of a hundred.
ID_CHARACTERS_MIN = 8

STATUS_STYLES = {"online": "green", "draining": "yellow", "offline": "dim", "banned": "red"}


def console() -> Console:
    """Return stdout's console; without colours in a pipe, and as wide there as needed."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)


def show(listing: Any, as_json: bool, table: Callable[[Any], Table]) -> None:
    """Print a value, or a list of them, as one JSON document or as a table."""
    if as_json:
        show_json(listing)
    else:
        console().print(table(listing))


def show_json(listing: Any) -> None:
    """Print a value, or a list of them, as one JSON document."""
    document = [asdict(item) for item in listing] if isinstance(listing, list) else asdict(listing)
    typer.echo(json.dumps(document, indent=2))


def clean(text: str) -> str:
    """Return text without control characters, except line ends and tabs."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t ")


def models_table(models: Sequence[Model]) -> Table:
    table = new_table("model", "revision", "context", "engines ready", "licence", "digest")
    for model in models:
        row = (
            model.name,
            model.revision,
            f"{model.context_tokens}",
            f"{model.engines_ready}",
            model.licence,
            model.manifest_digest.removeprefix("sha256:")[:12],
        )
        table.add_row(*(_cell(value) for value in row))
    return table


def nodes_table(nodes: Iterable[Node]) -> Table:
    """Return the fleet table; on a narrow terminal device, memory and power share a column, as do model and speed.

    Whether what stands there is the node's word is said of each node, and of each speed.
    """
    nodes = list(nodes)
    wide = console().width >= WIDE_COLUMNS
    length = max((len(node.node_id) for node in nodes), default=0) if not sys.stdout.isatty() else _id_length(nodes)
    if wide:
        table = new_table("node", "owner", "status", "device", "memory", "power", "model", "tokens/s")
    else:
        table = new_table("node", "status", "machine", "model")
        table.padding = (0, 2, 1, 0)
    # What is typed after `drain` and `ban` stays whole; everything else may fold.
    table.columns[0].no_wrap = True
    for node in nodes:
        name = Text(clean(node.node_id)[:length])
        if node.label:
            name.append(f"\n{clean(node.label)}", style="dim")
        status = Text(clean(node.status), style=STATUS_STYLES.get(node.status, ""))
        if node.running_attempts:
            status.append(f"\n{node.running_attempts} running", style="dim")
        if node.status == "online" and node.expected_lent_s:
            status.append(f"\nlent ~{_long_time(node.expected_lent_s)}", style="dim")
        device, memory, power = f"{_devices(node, wide)}\n{node.capability}", _memory(node), _power(node.gpus)
        models = [_engine_name(engine) for engine in node.engines]
        speeds = [_speed(engine, node.rates) for engine in node.engines]
        if wide:
            cells = [device, memory, power, "\n".join(models) or NONE, "\n".join(speeds) or NONE]
            table.add_row(name, _cell(node.owner_name), status, *(_cell(cell) for cell in cells))
        else:
            engines = [f"{model}\n{speed} tokens/s" for model, speed in zip(models, speeds, strict=True)]
            machine = f"{device}\n{memory}" + ("" if power == NONE else f", {power}")
            table.add_row(name, status, _cell(machine), _cell("\n".join(engines) or NONE))
    table.caption = (
        "A verified device has shown by exact work what it can do. tokens/s of one answer, timed by the coordinator; "
        "* self-reported. Memory free/total, power drawn/limit. lent: how long it stays so on average, by its history."
    )
    table.caption_justify = "left"
    return table


def keys_table(keys: Sequence[ApiKey]) -> Table:
    table = new_table("key", "name", "role", "created", "revoked")
    for key in keys:
        row = (key.key_id, key.name, key.role, time_text(key.created_at_ms), time_text(key.revoked_at_ms))
        table.add_row(*(_cell(value) for value in row))
    return table


def owners_table(owners: Sequence[Owner]) -> Table:
    table = new_table("owner", "name", "trusted", "created")
    for owner in owners:
        row = (owner.owner_id, owner.name, "yes" if owner.trusted else "no", time_text(owner.created_at_ms))
        table.add_row(*(_cell(value) for value in row))
    return table


def accounts_table(accounts: Sequence[LedgerAccount]) -> Table:
    table = new_table("account", "credits")
    for account in accounts:
        table.add_row(_cell(account.account), _cell(f"{account.balance_micro / 1_000_000:,.6f}"))
    return table


def task_table(task: Task) -> Table:
    table = new_table("attempt", "node", "first token", "delivered", "outcome", "statement", "energy")
    for record in task.attempts:
        row = (
            f"{record.attempt}",
            record.node_id,
            f"{record.first_index}",
            f"{record.delivered_tokens}",
            record.outcome,
            "signed" if record.signed else "none",
            "" if record.energy_j is None else f"{record.energy_j:,.1f} J ({record.energy_method.replace('_', ' ')})",
        )
        table.add_row(*(_cell(value) for value in row))
    table.title = (
        f"task {clean(task.task_id)}: {clean(task.status)}, "
        f"{task.usage.prompt_tokens} + {task.usage.completion_tokens} tokens"
    )
    table.title_justify = "left"
    if task.error is not None:
        table.caption = f"{task.error.reason}: {clean(task.error.message)}"
        table.caption_justify = "left"
    return table


def node_line(node: Node) -> str:
    """Return a node on one line, for a watch that is piped."""
    models = ", ".join(_engine_name(engine) for engine in node.engines) or NONE
    return clean(f"{node.node_id}\t{node.label}\t{node.status}\t{_devices(node, wide=True)}\t{models}").replace(
        "\n", "; "
    )


def new_table(*headings: str) -> Table:
    """Return an empty table in the style of all listings."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _cell(text: str) -> Text:
    # Text, not str: a label in square brackets is no markup.
    return Text(clean(text))


def _long_time(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h" if hours < 72 else f"{hours / 24:.0f} d"


def _id_length(nodes: Sequence[Node]) -> int:
    """Return how many characters of an id tell these nodes apart; commands take such a beginning."""
    ids = {node.node_id for node in nodes}
    longest = max(map(len, ids), default=0)
    lengths = range(min(ID_CHARACTERS_MIN, longest), longest)
    return next((length for length in lengths if len({node_id[:length] for node_id in ids}) == len(ids)), longest)


def _devices(node: Node, wide: bool) -> str:
    if not node.gpus:
        return f"CPU, {node.host.cpu_cores} cores" + (f"\n{node.host.cpu_model}" if wide else "")
    counts = Counter(_gpu_name(gpu) for gpu in node.gpus)
    return "\n".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _gpu_name(gpu: Gpu) -> str:
    if gpu.name.value is None:
        return f"GPU ({gpu.name.status})"
    return f"GPU {gpu.name.value.removeprefix('NVIDIA ').removeprefix('GeForce ')}"


def _memory(node: Node) -> str:
    if not node.gpus:
        return _gibibytes(node.host.memory_free_bytes, node.host.memory_total_bytes)
    readings = [(gpu.memory_free_bytes, gpu.memory_total_bytes) for gpu in node.gpus]
    free = [free.value for free, _ in readings if free.value is not None]
    total = [total.value for _, total in readings if total.value is not None]
    if len(free) < len(readings) or len(total) < len(readings):
        return readings[0][1].status if not total else f"?/{sum(total) / 2**30:.0f} GiB"
    return _gibibytes(sum(free), sum(total))


def _gibibytes(free: float, total: float) -> str:
    return f"{free / 2**30:.0f}/{total / 2**30:.0f} GiB"


def _power(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return NONE
    draws = [gpu.power_draw_w.value for gpu in gpus if gpu.power_draw_w.value is not None]
    limits = [gpu.power_limit_w.value for gpu in gpus if gpu.power_limit_w.value is not None]
    if len(draws) < len(gpus):
        return next(gpu.power_draw_w.status for gpu in gpus if gpu.power_draw_w.value is None)
    return f"{sum(draws):.0f}/{sum(limits):.0f} W" if len(limits) == len(gpus) else f"{sum(draws):.0f} W"


def _engine_name(engine: Engine) -> str:
    name = engine.model or NONE
    if engine.status != "ready":
        name += f" ({engine.status})"
    elif engine.ask_refusal:
        name += " (asks too much)"
    return name if engine.open is None else f"{name}, {_for_the_fleet(engine.open)}"


def _for_the_fleet(told: OpenEngine) -> str:
    """Return what an engine whose model the fleet chooses is to have next."""
    if not told.wanted_digest:
        return "open to the fleet"
    share = f" {100 * told.fetched_bytes / told.total_bytes:.0f} %" if told.total_bytes else ""
    return f"fetches {told.wanted_digest.removeprefix('sha256:')[:12]}{share}"


def _speed(engine: Engine, rates: Sequence[MeasuredRate]) -> str:
    for rate in rates:
        if rate.streams == 1 and rate.manifest_digest == engine.manifest_digest:
            return f"{rate.tokens_per_second:.0f}"
    return f"{engine.tokens_per_second:.0f}*" if engine.tokens_per_second else NONE


def time_text(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M} UTC" if milliseconds else NONE
