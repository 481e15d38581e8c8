"""How messages follow each other on a prover's pipes. Without numpy, which an agent has no use for."""

from typing import Final

# Big-endian, before each protobuf message.
LENGTH_BYTES: Final = 4
