"""`slackwater-agent doctor`: what may be wrong with this machine, each with its cause and one command that mends it."""
