"""A parsed TOML document held against structs: what is wrong with it, with the key and what it may hold."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import Type, type_info

from agent.errors import ConfigInvalid

S = TypeVar("S", bound=msgspec.Struct)

# "Expected `int` >= 1 - at `$.engines[0].slots`", as msgspec ends its messages.
_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.?(?P<key>[^.\[\]]+)|\[(?P<index>\d+|\.\.\.)\]")


def decode(document: Mapping[str, Any], shape: type[S], dec_hook: Callable[[type, Any], Any]) -> S:
    """Return the document as a value of the shape.

    Raises:
        ConfigInvalid: an unknown or missing key, or a value that is not allowed; the text names the dotted key.
    """
    for complaint in _unknown_keys(document, type_info(shape), ""):
        raise ConfigInvalid(complaint)
    try:
        return msgspec.convert(document, shape, dec_hook=dec_hook)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(_explain(str(error), document, shape)) from error


def _unknown_keys(value: object, shape: Type, where: str) -> Iterator[str]:
    shape = _bare(shape)
    if isinstance(shape, msgspec.inspect.UnionType):
        for one in shape.types:
            yield from _unknown_keys(value, one, where)
    elif isinstance(shape, msgspec.inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in shape.fields}
        for key, inner in value.items():
            dotted = f"{where}.{key}" if where else key
            if key not in fields:
                yield f"unknown key {dotted}{_suggest(key, sorted(fields))}"
            else:
                yield from _unknown_keys(inner, fields[key], dotted)
    elif isinstance(shape, msgspec.inspect.VarTupleType) and isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unknown_keys(inner, shape.item_type, f"{where}[{index}]")


def _suggest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    meant = f": did you mean {close[0]}?" if close else ";"
    return f"{meant} known are {', '.join(known)}"


def _explain(complaint: str, document: Mapping[str, Any], shape: type) -> str:
    place = _PLACE.search(complaint)
    path = place["path"] if place else ""
    told = complaint[: place.start()] if place else complaint
    missing = re.fullmatch(r"Object missing required field `(.*)`", told)
    if missing:
        return f"missing key {path}.{missing[1]}" if path else f"missing key {missing[1]}"
    value, kind = _at(document, type_info(shape), path)
    allowed = _allowed(kind)
    if allowed is None or (isinstance(kind, msgspec.inspect.StructType) and isinstance(value, dict)):
        # What a check of ours said: of one value, or of a table as a whole.
        return f"{path} {told}" if told.startswith("must ") else f"{path}: {told}"
    return f"{path} must be {allowed}, not {value!r}"


def _at(value: Any, shape: Type, path: str) -> tuple[Any, Type]:
    """Return what stands at a path of the document, and what should."""
    shape = _bare(shape)
    for step in _STEP.finditer(path):
        if isinstance(shape, msgspec.inspect.UnionType):
            shape = _bare(shape.types[0])
        if step["key"] is not None:
            assert isinstance(shape, msgspec.inspect.StructType), "unknown keys were refused before"
            shape = next(field.type for field in shape.fields if field.encode_name == step["key"])
            value = value.get(step["key"])
        elif isinstance(shape, msgspec.inspect.DictType):
            # Which of its keys it is, the message does not say.
            shape = shape.value_type
        else:
            assert isinstance(shape, msgspec.inspect.VarTupleType), "lists are tuples in these structs"
            shape = shape.item_type
            value = value[int(step["index"])] if step["index"].isdecimal() and isinstance(value, list) else value
        shape = _bare(shape)
    return value, shape


def _bare(shape: Type) -> Type:
    """Return what a type is without what is only said about it, such as a description."""
    while isinstance(shape, msgspec.inspect.Metadata):
        shape = shape.type
    return shape


def _allowed(kind: Type) -> str | None:
    """Return what a key may hold, in words; None where only its own check can tell."""
    match _bare(kind):
        case msgspec.inspect.UnionType(types=types):
            words = [_allowed(one) for one in types if not isinstance(_bare(one), msgspec.inspect.NoneType)]
            return None if None in words else " or ".join(filter(None, words))
        case msgspec.inspect.IntType() as whole:
            return f"a whole number{_range(whole)}"
        case msgspec.inspect.FloatType() as number:
            return f"a number{_range(number)}"
        case msgspec.inspect.DecimalType():
            return 'a number, or a number as a string, such as "0.32"'
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case msgspec.inspect.StrType(pattern=None, max_length=None, min_length=1):
            return "a string that is not empty"
        case msgspec.inspect.StrType(pattern=None, max_length=None):
            return "a string"
        case msgspec.inspect.StrType(pattern=None, max_length=int(most)):
            return f"a string of at most {most} characters"
        case msgspec.inspect.StrType() | msgspec.inspect.CustomType():
            return None
        case msgspec.inspect.StructType() | msgspec.inspect.DictType():
            return "a table"
        case msgspec.inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            count = f"{least or 0} to {most} " if most is not None else ""
            return f"a list of {count}{_plural(item)}"
        case _:
            return None


def _plural(kind: Type) -> str:
    match _bare(kind):
        case msgspec.inspect.StructType():
            return "tables"
        case msgspec.inspect.StrType():
            return "strings"
        case _:
            return "numbers"


def _range(kind: "msgspec.inspect.IntType | msgspec.inspect.FloatType") -> str:
    least = f" from {kind.ge:g}" if kind.ge is not None else f" above {kind.gt:g}" if kind.gt is not None else ""
    most = f" to {kind.le:.7g}" if kind.le is not None else f" below {kind.lt:g}" if kind.lt is not None else ""
    return least + most
