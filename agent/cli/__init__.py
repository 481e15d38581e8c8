"""The commands of `slackwater-agent`, a file for each concern; `agent.__main__` puts them together."""
