"""The command line `slackwater`. Nothing here imports gRPC before a command needs a connection."""

from slackwater.cli.app import main

__all__ = ["main"]
