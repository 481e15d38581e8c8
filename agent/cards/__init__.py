"""The graphics cards of this machine, read through a watched child, and their heat."""
