"""Whether the owner needs the machine, and what the agent may do with it meanwhile."""
