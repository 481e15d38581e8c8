"""What holds for every test."""

from hypothesis import settings

# How long an example takes says more about the machine than about the code; pytest-timeout bounds the whole test.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
