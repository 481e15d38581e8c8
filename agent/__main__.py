"""The command line of `slackwater-agent`: which commands there are. Each lives in `agent.cli`."""

import typer

from agent.cli import holding, looking, operating, serving, tuning
from agent.cli.options import log_to_standard_error

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Lends this machine's graphics cards to a fleet while its owner does not need them.",
    epilog="Exit status: 0 stopped as asked, 1 a bug, 2 configuration, 3 join refused, 4 not joined, "
    "5 a newer agent uses this identity, 6 banned, 7 protocol version, 8 no usable model, 9 not running, "
    "10 disk full or broken, 11 the running agent did not follow, 12 the coordinator's ledger does not hold.",
)
app.command()(serving.join)
app.command()(serving.run)
app.command()(looking.status)
app.command()(looking.receipts)
app.command()(looking.why)
app.command()(looking.appeal)
app.command()(holding.pause)
app.command()(holding.resume)
app.command()(holding.drain)
app.command("calibrate-power")(tuning.calibrate_power)
app.add_typer(tuning.models, name="models")
app.command("check-config")(serving.check_config)
app.command()(operating.doctor)
app.command()(operating.logs)
app.command("install-engine")(operating.install_engine)
app.command("install-service")(operating.install_service)
app.command()(operating.uninstall)
app.command("clean-up")(operating.clean_up)


def main() -> None:
    """Entry point of `slackwater-agent`."""
    log_to_standard_error()
    app()


if __name__ == "__main__":
    main()
