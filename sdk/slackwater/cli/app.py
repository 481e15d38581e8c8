"""The commands. Each converts its arguments, calls the client, and prints."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from slackwater.cli.arguments import find_node_id, give_secret, micro_credits, only_model, read_prompt
from slackwater.cli.ledger import ledger
from slackwater.cli.session import ExitCode, Settings, UsageError, check_writable, connected

if TYPE_CHECKING:
    from slackwater.events import ServiceClass

EXIT_CODES = """Exit status: 0 done; 1 unexpected (a bug); 2 wrong usage; 3 the request must change (key, model, \
parameter); 4 nobody must act, try again later; 5 the fleet's operator must act; 6 something did not verify; 130 \
interrupted."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
keys = typer.Typer(no_args_is_help=True, help="Make, list and end API keys (administrators).", rich_markup_mode=None)
owners = typer.Typer(
    no_args_is_help=True, help="Make and list owners of nodes (administrators).", rich_markup_mode=None
)
app.add_typer(keys, name="keys")
app.add_typer(owners, name="owners")
app.add_typer(ledger, name="ledger")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DeadlineMs = Annotated[int | None, typer.Option(help="Milliseconds until the whole answer has to be there.")]
MaxTtftMs = Annotated[int | None, typer.Option(help="Milliseconds to the first token; else as the class promises.")]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Node id, the beginning of one, or a label.")]
SecretFile = Annotated[
    Path | None, typer.Option("--out", help="Write the secret to this new file (mode 0600), not to the screen.")
]


@app.callback()
def settings(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(envvar="SLACKWATER_ADDRESS", metavar="HOST:PORT", help="The coordinator's gRPC address."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SLACKWATER_API_KEY_FILE", help="File that holds the API key. Or set SLACKWATER_API_KEY to the key."
        ),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(envvar="SLACKWATER_CA_FILE", help="The fleet's CA certificate (PEM).")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the traceback of a failure.")] = False,
) -> None:
    """Ask a Slackwater fleet, and run it.

    \b
    First say where it is and who you are (keys are never arguments, which other users could see):
      export SLACKWATER_ADDRESS=coordinator.example:8443
      export SLACKWATER_CA_FILE=~/slackwater-ca.pem
      export SLACKWATER_API_KEY_FILE=~/.slackwater-key

    \b
    Then:
      slackwater models                        what can be asked
      slackwater chat "Why is the sky blue?"   ask
      slackwater nodes --watch                 who answers
      slackwater COMMAND --help                examples of each
    """
    context.obj = Settings(address=address, api_key_file=api_key_file, ca_file=ca_file, verbose=verbose)


@app.command()
def chat(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="What to say; from stdin when it is left out or '-'.")] = None,
    model: Annotated[str | None, typer.Option(help="Needed when the fleet serves several.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer; else what the context leaves.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    service_class: Annotated[
        str, typer.Option(help="interactive, standard (later is fine) or batch (whenever there is room).")
    ] = "interactive",
    deadline_ms: DeadlineMs = None,
    max_ttft_ms: MaxTtftMs = None,
    max_price: Annotated[
        float | None, typer.Option(help="Credits; the task is refused where it could cost more.")
    ] = None,
    show_events: Annotated[bool, typer.Option("--show-events", help="Tell on stderr which node answers.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check the node's signed statement at the end.")] = False,
) -> None:
    """Ask one question and print the answer as it comes.

    The answer goes on from another node when one is lost. Ctrl-C ends the task on the fleet, too.

    \b
    Examples:
      slackwater chat "Name three tides."
      slackwater chat --max-tokens 200 --temperature 0 < question.txt
      git diff | slackwater chat --model qwen3-8b > review.md
      slackwater chat --show-events --verify "Tell me a long story."
      slackwater chat --service-class batch --max-price 0.5 < report.txt
    """
    from slackwater.cli.conversation import converse

    with connected(context) as client:
        text = read_prompt(prompt)
        answer = client.chat(
            text,
            model=model or only_model(client),
            max_tokens=max_tokens,
            temperature=temperature,
            service_class=cast("ServiceClass", service_class),
            deadline_ms=deadline_ms,
            max_ttft_ms=max_ttft_ms,
            max_price_micro=None if max_price is None else micro_credits(max_price),
        )
        converse(answer, show_events=show_events, verify=verify)


@app.command()
def quote(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="What would be said; from stdin when it is '-'.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of the prompt, in place of it.")] = None,
    model: Annotated[str | None, typer.Option(help="Needed when the fleet serves several.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer; else what the context leaves.")] = None,
    deadline_ms: DeadlineMs = None,
    max_ttft_ms: MaxTtftMs = None,
    as_json: AsJson = False,
) -> None:
    """Say what would become of a task, and what it would cost.

    For each service class: whether its target would be met now, the wait, the speed, energy and CO2.

    \b
    Examples:
      slackwater quote --max-tokens 200 "Name three tides."
      slackwater quote --prompt-tokens 3000 --max-ttft-ms 2000 --json
    """
    from slackwater.cli import explain, output

    with connected(context) as client:
        quoted = client.quote(
            None if prompt_tokens is not None and prompt is None else read_prompt(prompt),
            model=model or only_model(client),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            deadline_ms=deadline_ms,
            max_ttft_ms=max_ttft_ms,
        )
        output.show(quoted, as_json, explain.quote_table)


@app.command()
def why(context: typer.Context, task_id: str, as_json: AsJson = False) -> None:
    """Explain where a task went, attempt by attempt, or what it waits for.

    \b
    Example:
      slackwater why task-000001-5f0c2d1e9a3b4c5d6e7f
    """
    from slackwater.cli import explain, output

    with connected(context) as client:
        record = client.get_task(task_id)
        if as_json:
            output.show_json(record)
            return
        for line in explain.why_lines(record):
            typer.echo(line)


@app.command()
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the models that can be asked for.

    \b
    Example:
      slackwater models --json | jq -r '.[].name'
    """
    from slackwater.cli import output

    with connected(context) as client:
        listing = client.models()
        output.show(listing, as_json, output.models_table)


@app.command()
def nodes(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and show every change; Ctrl-C ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the nodes of the fleet.

    Device, memory, power, model, speed and status; what a node says of itself is self-reported.

    With --watch and --json, every change is one line of JSON.

    \b
    Examples:
      slackwater nodes
      slackwater nodes --watch
      slackwater nodes --json | jq '.[] | select(.status == "online") | .node_id'
    """
    from slackwater.cli import output
    from slackwater.cli.watching import watch_nodes

    with connected(context) as client:
        if watch:
            watch_nodes(client, as_json=as_json)
            return
        listing = client.nodes()
        output.show(listing, as_json, output.nodes_table)


@app.command()
def task(context: typer.Context, task_id: str, as_json: AsJson = False) -> None:
    """Show how a task stands, with its attempts.

    \b
    Example:
      slackwater task 0198c7d2a1
    """
    from slackwater.cli import output

    with connected(context) as client:
        record = client.get_task(task_id)
        output.show(record, as_json, output.task_table)


@app.command()
def drain(context: typer.Context, node: NodeName) -> None:
    """Move a node's work away (administrators).

    It gets no new work, and what it runs goes on elsewhere.

    \b
    Example:
      slackwater drain attic
    """
    with connected(context) as client:
        changed = client.drain(find_node_id(client, node))
        typer.echo(f"{changed.node_id} is {changed.status}")


@app.command()
def resume(context: typer.Context, node: NodeName) -> None:
    """End a drain (administrators)."""
    with connected(context) as client:
        changed = client.resume(find_node_id(client, node))
        typer.echo(f"{changed.node_id} is {changed.status}")


@app.command()
def ban(
    context: typer.Context,
    node: NodeName,
    reason: Annotated[str, typer.Option(help="Shown to the owner.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Shut a node out (administrators).

    From its next message on, and for good.

    \b
    Example:
      slackwater ban attic --reason "answers that do not re-score, see verdict 12"
    """
    with connected(context) as client:
        node_id = find_node_id(client, node)
        if not yes:
            if not sys.stdin.isatty():
                raise UsageError("a ban cannot be taken back; pass --yes where nobody can be asked")
            if not typer.confirm(f"Ban {node_id}? This cannot be taken back", err=True):
                raise typer.Exit(ExitCode.USAGE)
        changed = client.ban(node_id, reason=reason)
        typer.echo(f"{changed.node_id} is {changed.status}")


@app.command()
def release(
    context: typer.Context,
    verdict: Annotated[str, typer.Argument(metavar="VERDICT", help="The verdict in force on the node.")],
    reason: Annotated[str, typer.Option(help="Shown to the owner.")],
) -> None:
    """Take a quarantine back (administrators).

    The node is in probation again, with nothing against it, as after an appeal that was won: for a verdict that
    is known to be wrong, or that nobody can measure again.

    \b
    Example:
      slackwater-coordinator verdicts list NODE     # shows the verdict in force
      slackwater release verdict-0123456789abcdef --reason "the driver was broken, and is replaced"
    """
    with connected(context) as client:
        typer.echo(f"released: {client.release(verdict, reason=reason)} puts the node in probation")


@app.command()
def join_string(
    context: typer.Context,
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="The owner's name or id.")],
    lifetime_s: Annotated[int | None, typer.Option(help="Seconds until it expires; at most 3600.")] = None,
    out: SecretFile = None,
) -> None:
    """Let one machine join (administrators).

    A join string admits one machine of an owner, once. It is a secret, and printed alone on stdout, so that it
    can be piped.

    \b
    Examples:
      slackwater join-string lab --out attic.join
      slackwater join-string lab | ssh attic 'umask 077; cat > attic.join'
    """
    from slackwater.cli import output

    with connected(context) as client:
        check_writable(out)
        made = client.create_join_string(owner, lifetime_s=lifetime_s)
        give_secret(made.join_string, out, f"valid until {output.time_text(made.expires_at_ms)}, once")


@keys.command("list")
def list_keys(context: typer.Context, as_json: AsJson = False) -> None:
    """List the API keys, without their secrets."""
    from slackwater.cli import output

    with connected(context) as client:
        listing = client.api_keys()
        output.show(listing, as_json, output.keys_table)


@keys.command("create")
def create_key(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="1 to 64 characters.")],
    admin: Annotated[bool, typer.Option("--admin", help="May run the fleet.")] = False,
    out: SecretFile = None,
) -> None:
    """Make an API key. Its secret is shown this once, alone on stdout.

    \b
    Example:
      slackwater keys create web-shop --out web-shop.key
    """
    with connected(context) as client:
        check_writable(out)
        made = client.create_api_key(name, role="admin" if admin else "tenant")
        give_secret(made.secret, out, f"{made.key.role} key {made.key.key_id} for {made.key.name}")


@keys.command("revoke")
def revoke_key(context: typer.Context, key_id: str) -> None:
    """End an API key, at once."""
    with connected(context) as client:
        revoked = client.revoke_api_key(key_id)
        typer.echo(f"{revoked.key_id} ({revoked.name}) is revoked")


@owners.command("list")
def list_owners(context: typer.Context, as_json: AsJson = False) -> None:
    """List the owners of nodes."""
    from slackwater.cli import output

    with connected(context) as client:
        listing = client.owners()
        output.show(listing, as_json, output.owners_table)


@owners.command("create")
def create_owner(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="1 to 64 characters, unique.")],
    trusted: Annotated[bool, typer.Option("--trusted", help="May serve the privacy class trusted_owners.")] = False,
) -> None:
    """Register an owner of nodes.

    \b
    Example:
      slackwater owners create lab --trusted && slackwater join-string lab
    """
    with connected(context) as client:
        made = client.create_owner(name, trusted=trusted)
        typer.echo(f"{made.owner_id} is {made.name}")


def main() -> None:
    """Run the command line."""
    app(prog_name="slackwater")
