"""A strict reader of JSON objects: every fault names the parameter.

JSON's null means the same as leaving the field out, as in OpenAI's API.
"""

import math
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar

from coordinator.errors import Reason, SlackwaterError

_EnumT = TypeVar("_EnumT", bound=Enum)

# What no tokenizer can be trusted with: NUL, and halves of a character that has no UTF-8 form.
_FORBIDDEN = re.compile("[\x00\ud800-\udfff]")


def invalid(param: str, message: str) -> SlackwaterError:
    return SlackwaterError(Reason.INVALID_ARGUMENT, f"'{param}': {message}", param=param)


def unsupported(param: str, message: str) -> SlackwaterError:
    return SlackwaterError(Reason.UNSUPPORTED, f"'{param}': {message}", param=param)


def checked_text(value: object, param: str) -> str:
    """Return `value` if it is a string that has a UTF-8 form and no NUL."""
    if not isinstance(value, str):
        raise invalid(param, f"expected a string, got {_kind(value)}")
    if found := _FORBIDDEN.search(value):
        what = "a NUL character" if found.group() == "\x00" else "half of a surrogate pair, which is no character"
        raise invalid(param, f"contains {what} at position {found.start()}; remove it")
    return value


def _kind(value: object) -> str:
    """Return JSON's name of a value's type; never the value, which may be private or huge."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "an array"
        case _:
            return "an object"


class Fields:
    """One JSON object, read field by field; `refuse_rest` names what nobody read."""

    def __init__(self, value: object, param: str = "") -> None:
        if not isinstance(value, dict):
            if not param:
                raise SlackwaterError(
                    Reason.INVALID_ARGUMENT, f"the request body must be a JSON object, got {_kind(value)}"
                )
            raise invalid(param, f"expected an object, got {_kind(value)}")
        self._values: dict[str, object] = value
        self._param = param
        self._read: set[str] = set()

    def param(self, name: str) -> str:
        """Return the full name of a field, such as `messages[2].content`."""
        return f"{self._param}.{name}" if self._param else name

    def take(self, name: str) -> object:
        """Return a field's value; None where it is absent or null."""
        self._read.add(name)
        return self._values.get(name)

    def required_text(self, name: str) -> str:
        value = self.take(name)
        if value is None:
            raise invalid(self.param(name), "is required")
        if not checked_text(value, self.param(name)):
            raise invalid(self.param(name), "must not be empty")
        return str(value)

    def boolean(self, name: str) -> bool:
        """Return a flag; false where it is absent."""
        value = self.take(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise invalid(self.param(name), f"expected a boolean, got {_kind(value)}")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        return checked_integer(value, self.param(name), low, high)

    def number(self, name: str, low: float, high: float, *, low_included: bool = True) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(self.param(name), f"expected a number, got {_kind(value)}")
        inside = low <= value <= high if low_included else low < value <= high
        # 1e999 is read as infinity; an integer too large for a float fails the comparison first.
        if not inside or not math.isfinite(value):
            bracket = "[" if low_included else "("
            raise invalid(self.param(name), f"must be in {bracket}{low:g}, {high:g}]")
        return float(value)

    def choice(self, name: str, values: type[_EnumT], default: _EnumT) -> _EnumT:
        value = self.take(name)
        if value is None:
            return default
        for member in values:
            if member.value == value and isinstance(value, str):
                return member
        raise invalid(self.param(name), f"must be one of {', '.join(repr(member.value) for member in values)}")

    def ignore(self, expected: Mapping[str, type]) -> None:
        """Read the fields that have no effect here; their types are still checked."""
        for name, kind in expected.items():
            value = self.take(name)
            if value is not None and not isinstance(value, kind):
                raise invalid(self.param(name), f"has the wrong type: {_kind(value)}")

    def refuse_unless_neutral(self, neutral: Mapping[str, Iterable[object]]) -> None:
        """Refuse the fields whose effect is not built, unless their value asks for none."""
        for name, values in neutral.items():
            value = self.take(name)
            # Types are compared too: True equals 1 in Python, not in JSON.
            if value is not None and not any(type(value) is type(other) and value == other for other in values):
                raise unsupported(self.param(name), _refusal(name, tuple(values)))

    def refuse_rest(self) -> None:
        for name in self._values:
            if name not in self._read:
                # The name is the caller's: shortened, and made printable.
                shown = ascii(name[:64])[1:-1]
                raise invalid(self.param(shown), "is not a parameter of this endpoint; remove it")


def checked_integer(value: object, param: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(param, f"expected an integer, got {_kind(value)}")
    if not low <= value <= high:
        raise invalid(param, f"must be in [{low}, {high}]")
    return value


def checked_list(value: object, param: str, longest: int) -> list[object]:
    """Return a list of 1 to `longest` items."""
    if not isinstance(value, list):
        raise invalid(param, f"expected an array, got {_kind(value)}")
    if not value:
        raise invalid(param, "must not be empty")
    if len(value) > longest:
        raise invalid(param, f"has {len(value)} items; at most {longest} are taken")
    return value


def _refusal(name: str, neutral: tuple[object, ...]) -> str:
    if name == "n":
        return "only 1 is supported; send one request per choice"
    allowed = f"; only {' or '.join(repr(value) for value in neutral)} is accepted" if neutral else "; remove it"
    return f"is not supported{allowed}"
