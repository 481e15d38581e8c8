"""agent.example.toml documents every key of every table, shows the defaults, and loads, examples included."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.inspect import ListType, StructType, Type, UnionType, VarTupleType, type_info

from agent.config import AgentConfig, parse_config

EXAMPLE = Path(__file__).resolve().parents[3] / "agent.example.toml"
TEXT = EXAMPLE.read_text(encoding="utf-8")
# "# key = value" and "# [[table]]", as against prose.
COMMENTED = re.compile(r"^# (?=[a-z_]+ = |\[)", re.MULTILINE)


def struct_of(kind: Type) -> StructType | None:
    """Return the struct that a key holds, or holds a list of, or may hold."""
    if isinstance(kind, StructType):
        return kind
    if isinstance(kind, VarTupleType | ListType):
        return struct_of(kind.item_type)
    if isinstance(kind, UnionType):
        return next((found for one in kind.types if (found := struct_of(one)) is not None), None)
    return struct_of(kind.type) if isinstance(kind, msgspec.inspect.Metadata) else None


def missing_keys(shape: StructType, tables: list[dict[str, Any]], where: str = "") -> Iterator[str]:
    """Find the keys of a struct that no table of the document has."""
    for field in shape.fields:
        values = [table[field.encode_name] for table in tables if field.encode_name in table]
        if not values:
            yield f"{where}{field.encode_name}"
        inner = struct_of(field.type)
        if inner is not None:
            below = [one for value in values for one in (value if isinstance(value, list) else [value])]
            yield from missing_keys(inner, below, f"{where}{field.encode_name}.")


def root_shape() -> StructType:
    shape = type_info(AgentConfig)
    assert isinstance(shape, StructType)
    return shape


def test_every_key_of_every_table_stands_in_it() -> None:
    """Mutation seen to fail here: take any key out of the example."""
    document = tomllib.loads(COMMENTED.sub("", TEXT))
    assert list(missing_keys(root_shape(), [document])) == []


def test_a_key_that_is_missing_would_be_found() -> None:
    document = tomllib.loads(COMMENTED.sub("", TEXT))
    del document["owner"]["mode"]
    document["engines"] = [{key: value for key, value in one.items() if key != "slots"} for one in document["engines"]]
    assert sorted(missing_keys(root_shape(), [document])) == ["engines.slots", "owner.mode"]


def test_it_loads_as_it_is_and_with_every_example(tmp_path: Path) -> None:
    plain = parse_config(tomllib.loads(TEXT), tmp_path)
    full = parse_config(tomllib.loads(COMMENTED.sub("", TEXT)), tmp_path)
    assert (len(plain.engines), len(full.engines)) == (1, 4)


def test_what_is_not_commented_out_is_the_default(tmp_path: Path) -> None:
    """Mutation seen to fail here: change one value of [owner]."""
    shown = parse_config(tomllib.loads(TEXT), tmp_path)
    bare = parse_config(
        {
            "state_dir": "/var/lib/slackwater-agent",
            "engines": [{"engine_id": "main", "kind": "auto", "model_directory": "/srv/models/smollm2-135m-instruct"}],
        },
        tmp_path,
    )
    assert shown == bare


def test_every_key_has_a_comment_in_front_of_its_group() -> None:
    """Prose, not another key and not a blank line, stands before the first key of each group."""
    lines = TEXT.splitlines()
    for number, line in enumerate(lines):
        is_key = re.match(r"(# )?[a-z_]+ = ", line) is not None
        if is_key:
            above = number - 1
            while re.match(r"(# )?([a-z_]+ = |\[)", lines[above]):
                above -= 1
            assert lines[above].startswith("# "), f"line {number + 1} has no comment: {line}"
