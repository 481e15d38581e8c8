"""Joules of cards and tasks, the day's counts, and what they cost."""
