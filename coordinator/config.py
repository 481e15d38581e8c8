"""What an operator sets: one TOML file, overruled by the environment, read once at the start.

Every key may also come as an environment variable, SLACKWATER_ and the key in
capitals (lists separated by commas). Unknown keys are refused, since a
misspelt setting that is silently ignored is worse than none. A secret is never
a value here, only the path of a file that holds it.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from coordinator.api.server import Listen
from coordinator.enrolment.service import CERTIFICATE_HOURS_MAX, CERTIFICATE_HOURS_MIN
from coordinator.fleet.models import check_model_sources
from coordinator.ledger.entries import AMOUNT_MICRO_MAX
from coordinator.ledger.prices import DEFAULT_FEE_PERMILLE, PERMILLE, PRICE_MICRO_MAX, Price
from coordinator.planning.cost import JOULES_PER_KWH
from coordinator.startup import ExitCode, StartupError
from coordinator.verification.record import AUDIT_RATE_MIN

ENVIRONMENT_PREFIX = "SLACKWATER_"
# Of a thousand attempts. Fewer than the verdicts ask for would leave a cheat that waits for its moment unseen.
AUDIT_PERMILLE_MIN = round(AUDIT_RATE_MIN * PERMILLE)
# The dirtiest grids have some 1,300.
GRID_GRAMS_PER_KWH_MAX = 5_000
GRAMS_PER_KG = 1_000
# A few lines of settings; a file of this size is something else.
CONFIG_BYTES_MAX = 1024 * 1024

_INTEGERS = (
    "certificate_hours",
    "platform_fee_permille",
    "new_tenant_grant_micro",
    "audit_permille",
    "grid_grams_per_kwh",
    "energy_micro_per_kwh",
    "carbon_micro_per_kg",
)

_PUBLIC_LISTEN = Listen("127.0.0.1", 7443)
_NODE_LISTEN = Listen("127.0.0.1", 7444)
_GATEWAY_LISTEN = Listen("127.0.0.1", 7480)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Paths in the file may be relative to it."""

    # Keys, database, admin key; created with mode 0700.
    state_dir: Path
    # SQLite in state_dir by default; for PostgreSQL with a password use database_url_file.
    database_url: str | None = None
    database_url_file: Path | None = None
    # "host:port"; port 0 picks a free one. Loopback by default: a fleet is opened on purpose.
    public_listen: Listen = _PUBLIC_LISTEN
    node_listen: Listen = _NODE_LISTEN
    gateway_listen: Listen = _GATEWAY_LISTEN
    # Names and addresses by which agents and clients reach this machine. The first stands in join strings.
    advertised_hosts: tuple[str, ...] = ("127.0.0.1",)
    # PEM files with the public halves of the release keys that may sign models.
    release_keys: tuple[Path, ...] = ()
    # Directories with manifest.envelope and tokenizer files, registered at every start.
    models: tuple[Path, ...] = ()
    # Where agents may fetch a model's files, best first: "NAME=https://FOLDER" or "NAME=hf://OWNER/REPOSITORY@COMMIT".
    model_sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Shown to whoever lends a machine.
    abuse_contact: str = ""
    content_policy: str = ""
    # What a model costs its users, micro-credits per 1,000 tokens: "NAME=PROMPT/COMPLETION". Others cost DEFAULT_PRICE.
    list_prices: Mapping[str, Price] = field(default_factory=dict)
    # Of the list price, in thousandths: what a node that asks for nothing else does not get.
    platform_fee_permille: int = DEFAULT_FEE_PERMILLE
    # Budget of each API key that submits for the first time, in micro-credits; without it such keys have no limit.
    new_tenant_grant_micro: int | None = None
    # Grams of CO2 equivalent per kWh of the fleet's electricity, for quotes. The world's average of 2024 by default
    # (Ember, Global Electricity Review 2025).
    grid_grams_per_kwh: int = 473
    # What a kWh, and a kg of CO2 equivalent, are worth to the operator beside what owners ask, in micro-credits: the
    # router takes the engine for which ask and both together are least.
    energy_micro_per_kwh: int = 0
    carbon_micro_per_kg: int = 0
    # Nodes show by exact work what they can do and are timed; without it their figures are what they say of themselves.
    challenges: bool = True
    # Of a thousand attempts of a node with a long good record so many are audited; each costs a prefill of its ids.
    audit_permille: int = AUDIT_PERMILLE_MIN
    # Life of a node's certificate.
    certificate_hours: int = 48

    @property
    def audit_rate(self) -> float:
        """The share of attempts that is audited at least, in [0, 1]."""
        return self.audit_permille / PERMILLE

    @property
    def micro_per_joule(self) -> float:
        """What a joule on a card counts beside the ask, its carbon included."""
        grams = self.grid_grams_per_kwh * self.carbon_micro_per_kg / GRAMS_PER_KG
        return (self.energy_micro_per_kwh + grams) / JOULES_PER_KWH

    def resolve_database_url(self) -> str:
        """Return the URL in force, read from its file where one is named.

        Raises:
            StartupError: the file cannot be read.
        """
        if self.database_url_file is not None:
            return _read(self.database_url_file).decode().strip()
        return self.database_url or f"sqlite:///{self.state_dir / 'coordinator.db'}"


def load_config(path: Path, environment: Mapping[str, str]) -> Config:
    """Read the configuration.

    Raises:
        StartupError: the file cannot be read, or a setting is unknown, missing or wrong; the message names it.
    """
    raw = _read(path)
    try:
        settings: dict[str, Any] = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(path, f"is no valid TOML: {error}") from error
    known = {one.name: one for one in fields(Config)}
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        raise _bad(path, f"has the unknown key {unknown[0]!r}; known are: {', '.join(known)}")
    for name in known:
        value = environment.get(ENVIRONMENT_PREFIX + name.upper())
        if value is not None:
            settings[name] = _from_environment(name, value)
    required = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    for name in required:
        if name not in settings:
            raise _bad(path, f"lacks {name!r}")
    values: dict[str, Any] = {}
    for name, value in settings.items():
        try:
            values[name] = _READERS[name](value, path.resolve().parent)
        except (ValueError, ArgumentError) as error:
            raise _bad(path, f"has a wrong {name}: {error}") from error
    if "database_url" in values and "database_url_file" in values:
        raise _bad(path, "has both database_url and database_url_file; keep one")
    return Config(**values)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise StartupError(ExitCode.BAD_CONFIG, f"cannot read {path}: {error.strerror}") from error
    if len(content) > CONFIG_BYTES_MAX:
        raise _bad(path, f"has more than {CONFIG_BYTES_MAX} bytes")
    return content


def _bad(path: Path, what: str) -> StartupError:
    return StartupError(ExitCode.BAD_CONFIG, f"{path} {what}")


def _from_environment(name: str, value: str) -> object:
    if name in ("advertised_hosts", "release_keys", "models", "model_sources", "list_prices"):
        return [part.strip() for part in value.split(",") if part.strip()]
    if name in _INTEGERS:
        return int(value) if value.isascii() and value.isdigit() else value
    if name == "challenges":
        return {"true": True, "false": False}.get(value, value)
    return value


def _text(value: object, _base: Path) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{value!r} is not one line of text")
    return value


def _path(value: object, base: Path) -> Path:
    text = _text(value, base)
    if not text:
        raise ValueError("an empty path")
    return base / Path(text).expanduser()


def _listen(value: object, base: Path) -> Listen:
    host, colon, port = _text(value, base).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not host:port (IPv6 as [::1]:port)")
    return Listen(host, int(port))


def _database_url(value: object, base: Path) -> str:
    text = _text(value, base)
    if make_url(text).password is not None:
        raise ValueError("it contains a password; put the URL into a file (0600) and name that in database_url_file")
    return text


def _hours(value: object, _base: Path) -> int:
    if type(value) is not int or not CERTIFICATE_HOURS_MIN <= value <= CERTIFICATE_HOURS_MAX:
        raise ValueError(f"{value!r} is not a number from {CERTIFICATE_HOURS_MIN} to {CERTIFICATE_HOURS_MAX}")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _hosts(value: object, base: Path) -> tuple[str, ...]:
    hosts = tuple(_text(item, base) for item in _list(value))
    if not hosts or not all(hosts):
        raise ValueError("at least one host name or address is needed")
    return hosts


def _paths(value: object, base: Path) -> tuple[Path, ...]:
    return tuple(_path(item, base) for item in _list(value))


def _model_sources(value: object, base: Path) -> Mapping[str, tuple[str, ...]]:
    sources: dict[str, tuple[str, ...]] = {}
    for item in _list(value):
        name, equals, url = _text(item, base).partition("=")
        if not (name and equals and url):
            raise ValueError(f"{item!r} is not NAME=URL")
        sources[name] = (*sources.get(name, ()), url)
    check_model_sources(sources)
    return sources


def _list_prices(value: object, base: Path) -> Mapping[str, Price]:
    prices: dict[str, Price] = {}
    for item in _list(value):
        name, equals, price = _text(item, base).rpartition("=")
        amounts = [int(part) for part in price.split("/") if part.isascii() and part.isdigit()]
        if not (name and equals) or len(amounts) != 2 or max(amounts) > PRICE_MICRO_MAX:
            raise ValueError(f"{item!r} is not NAME=PROMPT/COMPLETION, each up to {PRICE_MICRO_MAX} micro-credits")
        prices[name] = Price(*amounts)
    return prices


def _fee(value: object, _base: Path) -> int:
    if type(value) is not int or not 0 <= value <= PERMILLE:
        raise ValueError(f"{value!r} is not a number from 0 to {PERMILLE}")
    return value


def _grant(value: object, _base: Path) -> int:
    if type(value) is not int or not 1 <= value <= AMOUNT_MICRO_MAX:
        raise ValueError(f"{value!r} is not a number from 1 to {AMOUNT_MICRO_MAX}")
    return value


def _audit_permille(value: object, _base: Path) -> int:
    if type(value) is not int or not AUDIT_PERMILLE_MIN <= value <= PERMILLE:
        raise ValueError(f"{value!r} is not a number from {AUDIT_PERMILLE_MIN} to {PERMILLE}")
    return value


def _grid(value: object, _base: Path) -> int:
    if type(value) is not int or not 0 <= value <= GRID_GRAMS_PER_KWH_MAX:
        raise ValueError(f"{value!r} is not a number from 0 to {GRID_GRAMS_PER_KWH_MAX}")
    return value


def _weight(value: object, _base: Path) -> int:
    if type(value) is not int or not 0 <= value <= AMOUNT_MICRO_MAX:
        raise ValueError(f"{value!r} is not a number of micro-credits from 0 to {AMOUNT_MICRO_MAX}")
    return value


def _switch(value: object, _base: Path) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


_READERS: dict[str, Callable[[object, Path], object]] = {
    "state_dir": _path,
    "database_url": _database_url,
    "database_url_file": _path,
    "public_listen": _listen,
    "node_listen": _listen,
    "gateway_listen": _listen,
    "advertised_hosts": _hosts,
    "release_keys": _paths,
    "models": _paths,
    "model_sources": _model_sources,
    "list_prices": _list_prices,
    "platform_fee_permille": _fee,
    "new_tenant_grant_micro": _grant,
    "grid_grams_per_kwh": _grid,
    "energy_micro_per_kwh": _weight,
    "carbon_micro_per_kg": _weight,
    "abuse_contact": _text,
    "content_policy": _text,
    "certificate_hours": _hours,
    "challenges": _switch,
    "audit_permille": _audit_permille,
}
