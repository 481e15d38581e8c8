"""How an examination is told: the table as a person sees it, JSON, and the bundle that goes with a question."""

import io
import json
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from agent.doctor.bundle import redact, write_bundle
from agent.doctor.check import Check, Patient, Status
from agent.doctor.examine import as_json, as_table, plan, summary

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "doctor.txt"

CHECKS = [
    Check("configuration", Status.OK, "/etc/slackwater/agent.toml is valid", ""),
    Check(
        "driver",
        Status.FAIL,
        "the loaded driver is 580.65.06, the library 580.82.07: it was updated under a running system",
        "sudo reboot",
    ),
    Check(
        "fence",
        Status.WARN,
        "UNFENCED: engines run with network and with the agent's keys in reach",
        "sudo apt install bubblewrap",
    ),
    Check(
        "input",
        Status.WARN,
        'nothing here sees input: nothing is lent unless [owner] when_input_unknown = "lend"',
        "${EDITOR:-nano} /etc/slackwater/agent.toml",
    ),
]


def test_the_table_is_the_one_that_was_agreed() -> None:
    """Mutation seen to fail here: leave brackets to be taken for markup. To renew: print what is compared."""
    text = io.StringIO()
    Console(file=text, width=100, highlight=False).print(as_table(CHECKS))
    told = "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + f"\n{summary(CHECKS)}\n"
    assert told == GOLDEN.read_text(encoding="utf-8")


def test_programs_get_the_same_as_values() -> None:
    told = json.loads(json.dumps(as_json(CHECKS)))
    assert told[1] == {
        "name": "driver",
        "status": "fail",
        "cause": CHECKS[1].cause,
        "fix": "sudo reboot",
    }


def test_without_a_configuration_what_needs_one_is_left_out(tmp_path: Path) -> None:
    patient = Patient(config_path=tmp_path / "none.toml", config=None, config_error="cannot read", now_ms=0)
    names = [probe.name for probe in plan(patient)]
    assert "configuration" in names
    assert "driver" in names
    assert not {"state directory", "identity", "coordinator"} & set(names)


@pytest.mark.parametrize(
    "secret",
    [
        "slackwater://host:7443/abc.SECRETSECRET?ca=sha256:00ff",
        "-----BEGIN PRIVATE KEY-----\nSECRETSECRET\n-----END PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nSECRETSECRET cut off",
        'api_key = "SECRETSECRET"',
        "password: SECRETSECRET",
        "Authorization: Bearer SECRETSECRET",
        '{"token": "SECRETSECRET"}',
        "https://anna:SECRETSECRET@mirror.example/",
        "sk-slackwater-SECRETSECRET",
        "SECRETSECRET" * 4,
    ],
)
def test_no_secret_leaves_the_machine(secret: str) -> None:
    assert "SECRETSECRET" not in redact(f"before {secret}\nafter")


def test_what_explains_a_fault_stays() -> None:
    text = "daily_tokens = 100000\nfake_tokens_per_second = 100.0\nnode e3e3a0f27b28754df005ba4c320bf892 driver 580.65"
    assert redact(text) == text


def test_people_and_cards_are_not_named() -> None:
    told = redact(f"{Path('/home', 'anna', 'models')} on GPU-12345678-1234-1234-1234-123456789012")
    assert told == "/home/<user>/models on GPU-12345678-..."


def test_the_bundle_holds_findings_configuration_versions_and_ends_of_logs(tmp_path: Path) -> None:
    """Mutation seen to fail here: write one of the parts without redacting it."""
    config = tmp_path / "agent.toml"
    config.write_text('state_dir = "state"\nsecret = "SECRETSECRET"\n')
    logs = tmp_path / "state/engines/main/logs"
    logs.mkdir(parents=True)
    (logs / "1-1.log").write_text("loading\nAuthorization: SECRETSECRET\n")
    (tmp_path / "state/identity.json").write_text('{"signing_key": "SECRETSECRET"}')
    write_bundle(tmp_path / "bundle.zip", CHECKS, config, tmp_path / "state")
    assert (tmp_path / "bundle.zip").stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(tmp_path / "bundle.zip") as bundle:
        assert sorted(bundle.namelist()) == ["agent.toml", "doctor.json", "logs/engine-main.log", "versions.json"]
        everything = b"".join(bundle.read(name) for name in bundle.namelist())
    assert b"loading" in everything
    assert b"SECRETSECRET" not in everything
