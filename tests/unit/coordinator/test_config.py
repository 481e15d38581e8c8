"""The configuration: defaults, the environment, and everything that is refused."""

from pathlib import Path

import pytest

from coordinator.api.server import Listen
from coordinator.config import load_config
from coordinator.ledger.prices import Price
from coordinator.startup import ExitCode, StartupError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "coordinator.toml"
    path.write_text(text)
    return path


def test_a_state_directory_is_enough(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, 'state_dir = "state"'), {})
    assert config.state_dir == tmp_path / "state"
    assert config.resolve_database_url() == f"sqlite:///{tmp_path}/state/coordinator.db"
    # Nothing is open to the network unless the operator says so.
    assert {config.public_listen.host, config.node_listen.host, config.gateway_listen.host} == {"127.0.0.1"}


def test_every_key_is_read(tmp_path: Path) -> None:
    text = """
state_dir = "/var/lib/slackwater"
database_url = "postgresql://coordinator@db/slackwater"
public_listen = "[::]:1"
node_listen = "0.0.0.0:2"
gateway_listen = "localhost:0"
advertised_hosts = ["coordinator.example", "10.0.0.7"]
release_keys = ["release.pub"]
models = ["/models/a", "b"]
model_sources = ["tiny=https://a/", "tiny=hf://o/r@0", "other=https://b?k=v"]
abuse_contact = "abuse@example.org"
content_policy = "be kind"
certificate_hours = 24
list_prices = ["tiny=100/200", "a=b=0/3"]
platform_fee_permille = 150
new_tenant_grant_micro = 1000000
audit_permille = 1000
grid_grams_per_kwh = 40
energy_micro_per_kwh = 3600000
carbon_micro_per_kg = 90000000
"""
    config = load_config(write(tmp_path, text), {})
    assert config.state_dir == Path("/var/lib/slackwater")
    assert config.resolve_database_url() == "postgresql://coordinator@db/slackwater"
    assert (config.public_listen, config.node_listen) == (Listen("::", 1), Listen("0.0.0.0", 2))
    assert str(config.public_listen) == "[::]:1"
    assert config.models == (Path("/models/a"), tmp_path / "b")
    assert config.model_sources == {"tiny": ("https://a/", "hf://o/r@0"), "other": ("https://b?k=v",)}
    assert config.release_keys == (tmp_path / "release.pub",)
    assert config.list_prices == {"tiny": Price(100, 200), "a=b": Price(0, 3)}
    assert (config.platform_fee_permille, config.new_tenant_grant_micro) == (150, 1_000_000)
    assert config.audit_permille == 1000
    assert config.grid_grams_per_kwh == 40
    # 3.6 credits a kWh, and 0.04 kg at 90 credits a kg, as many again.
    assert config.micro_per_joule == pytest.approx(2.0)
    assert (config.advertised_hosts[0], config.certificate_hours) == ("coordinator.example", 24)


def test_the_environment_overrules_the_file(tmp_path: Path) -> None:
    # Mutation seen to fail: the environment read first.
    environment = {
        "SLACKWATER_PUBLIC_LISTEN": "0.0.0.0:9",
        "SLACKWATER_MODELS": "/a, /b",
        "SLACKWATER_CERTIFICATE_HOURS": "72",
    }
    config = load_config(write(tmp_path, 'state_dir = "s"\npublic_listen = "127.0.0.1:1"'), environment)
    assert config.public_listen == Listen("0.0.0.0", 9)
    assert config.models == (Path("/a"), Path("/b"))
    assert config.certificate_hours == 72


def test_a_password_comes_from_a_file(tmp_path: Path) -> None:
    # Mutation seen to fail: the check for a password left out of `_database_url`.
    (tmp_path / "url").write_text("postgresql://c:secret@db/s\n")
    config = load_config(write(tmp_path, 'state_dir = "s"\ndatabase_url_file = "url"'), {})
    assert config.resolve_database_url() == "postgresql://c:secret@db/s"
    assert "secret" not in repr(config)
    with pytest.raises(StartupError, match="database_url_file") as refused:
        load_config(write(tmp_path, 'state_dir = "s"\ndatabase_url = "postgresql://c:secret@db/s"'), {})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "state_dir"),
        ('state_dir = "s"\npublik_listen = "a:1"', "publik_listen"),
        ("state_dir = 5", "state_dir"),
        ('state_dir = ""', "state_dir"),
        ('state_dir = "s"\npublic_listen = "nowhere"', "public_listen"),
        ('state_dir = "s"\npublic_listen = "a:70000"', "public_listen"),
        ('state_dir = "s"\npublic_listen = ":1"', "public_listen"),
        ('state_dir = "s"\nmodels = "a"', "models"),
        ('state_dir = "s"\nmodel_sources = ["tiny"]', "model_sources"),
        ('state_dir = "s"\nmodel_sources = ["tiny=http://10.0.0.1/"]', "https:// and hf://"),
        ('state_dir = "s"\nmodel_sources = ["tiny=file:///etc"]', "https:// and hf://"),
        ('state_dir = "s"\nadvertised_hosts = []', "advertised_hosts"),
        ('state_dir = "s"\ncertificate_hours = 23', "certificate_hours"),
        ('state_dir = "s"\ncertificate_hours = true', "certificate_hours"),
        ('state_dir = "s"\naudit_permille = 19', "audit_permille"),
        ('state_dir = "s"\ngrid_grams_per_kwh = -1', "grid_grams_per_kwh"),
        ('state_dir = "s"\ngrid_grams_per_kwh = 5001', "grid_grams_per_kwh"),
        ('state_dir = "s"\ngrid_grams_per_kwh = 473.5', "grid_grams_per_kwh"),
        ('state_dir = "s"\nenergy_micro_per_kwh = -1', "energy_micro_per_kwh"),
        ('state_dir = "s"\ncarbon_micro_per_kg = 0.5', "carbon_micro_per_kg"),
        ('state_dir = "s"\naudit_permille = 1001', "audit_permille"),
        ('state_dir = "s"\ndatabase_url = "nonsense"', "database_url"),
        ('state_dir = "s"\ndatabase_url = "sqlite:///a"\ndatabase_url_file = "b"', "both"),
        ("state_dir = ", "TOML"),
        ("a = " + "[" * 100_000, "TOML"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, text: str, named: str) -> None:
    # Mutation seen to fail: unknown keys ignored.
    with pytest.raises(StartupError, match=named) as refused:
        load_config(write(tmp_path, text), {})
    assert refused.value.exit_code is ExitCode.BAD_CONFIG
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match="cannot read") as refused:
        load_config(tmp_path / name, {})
    assert refused.value.exit_code is ExitCode.BAD_CONFIG
