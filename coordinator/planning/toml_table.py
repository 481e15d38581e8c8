"""A table of a TOML file, read strictly: every error names file and key, and unknown keys are refused."""

import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tables of prices or loads; a file of this size is something else.
FILE_BYTES_MAX = 1024 * 1024


class InputInvalid(ValueError):
    """A file that the planner is given cannot be used; the message says file, key and what is wrong, in one line."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table and where it stands, for messages: "FILE: cards.H100-PCIe"."""

    place: str
    values: Mapping[str, Any]

    def allow(self, known: Collection[str]) -> None:
        """Refuse keys that are not known: a misspelt one would silently leave a default in force."""
        unknown = sorted(self.values.keys() - set(known))
        if unknown:
            raise InputInvalid(f"{self.place}: unknown key {unknown[0]!r}; known are: {', '.join(known)}")

    def number(self, key: str, least: float, most: float = math.inf, default: float | None = None) -> float:
        """Return a number from `least` to `most`."""
        value = self.values.get(key, default)
        if value is None:
            raise InputInvalid(f"{self.place}: key {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputInvalid(f"{self.place}: {key} must be a number, not {value!r}")
        if not least <= value <= most:
            limits = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise InputInvalid(f"{self.place}: {key} must be {limits}, not {value!r}")
        return float(value)

    def switch(self, key: str) -> bool:
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise InputInvalid(f"{self.place}: {key} must be true or false, not {value!r}")
        return value

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value or not value.isprintable():
            raise InputInvalid(f"{self.place}: {key} must be one line of text, not {value!r}")
        return value

    def table(self, key: str) -> "Table":
        """Return a table in this one; an empty one where the key is missing."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise InputInvalid(f"{self.place}: {key} must be a table, [{key}]")
        return Table(f"{self.place}: {key}" if ": " not in self.place else f"{self.place}.{key}", value)

    def tables(self, key: str) -> list["Table"]:
        """Return the tables of an array, [[key]]; at least one is needed."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
            raise InputInvalid(f"{self.place}: at least one table [[{key}]] is needed")
        return [Table(f"{self.place}: {key} {number}", one) for number, one in enumerate(value, start=1)]


def read_table(path: Path) -> Table:
    """Return the whole of a TOML file.

    Raises:
        InputInvalid: it cannot be read, or is no TOML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InputInvalid(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise InputInvalid(f"{path}: has more than {FILE_BYTES_MAX} bytes")
    try:
        return Table(str(path), tomllib.loads(content.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputInvalid(f"{path}: is no valid TOML: {error}") from error
