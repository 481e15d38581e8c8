"""scripts/build_model.py as people run it: a process of its own."""

import json
import stat
import subprocess
import sys
from pathlib import Path

from inference.manifest import load_release_public_key, read_manifest, verify_directory

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_model.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)


def make_key(directory: Path) -> Path:
    key = directory / "keys" / "release.pem"
    made = run("release-key", "--out", key)
    assert made.returncode == 0, made.stderr
    assert load_release_public_key(key.with_suffix(".pub")).hex() == made.stdout.strip()
    return key


def make_model(directory: Path) -> Path:
    model = directory / "model"
    model.mkdir()
    config = {
        "architectures": ["Tiny"],
        "max_position_embeddings": 8,
        "vocab_size": 9,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (model / name).write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "model.safetensors").write_bytes(bytes(1000))
    return model


def test_a_release_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    key = make_key(tmp_path)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    content = key.read_bytes()
    again = run("release-key", "--out", key)
    assert again.returncode != 0
    assert "never overwritten" in again.stderr
    assert key.read_bytes() == content


def test_a_signed_directory_passes_the_check_before_loading(tmp_path: Path) -> None:
    key, model = make_key(tmp_path), make_model(tmp_path)
    fields = ("--name", "tiny", "--revision", "1", "--licence", "MIT", "--key", key)
    made = run("from-directory", model, *fields)
    assert made.returncode == 0, made.stderr
    manifest = read_manifest(model, [load_release_public_key(key.with_suffix(".pub"))])
    verify_directory(manifest, model)
    assert manifest.digest in made.stderr
    again = run("from-directory", model, *fields)
    assert again.returncode == 0, "safe to run twice"


def test_what_may_not_be_signed_is_one_clear_line(tmp_path: Path) -> None:
    key, model = make_key(tmp_path), make_model(tmp_path)
    (model / "modeling.py").write_text("")
    refused = run("from-directory", model, "--name", "tiny", "--revision", "1", "--licence", "MIT", "--key", key)
    assert refused.returncode != 0
    assert "'modeling.py' may not be part of a model" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (model / "manifest.envelope").exists()


def test_the_fake_model_is_made_once_and_repaired_when_damaged(tmp_path: Path) -> None:
    key, model, fake = make_key(tmp_path), make_model(tmp_path), tmp_path / "models" / "fake"
    command = ("fake", "--tokenizer", model, "--out", fake, "--key", key)
    assert run(*command).returncode == 0
    public = [load_release_public_key(key.with_suffix(".pub"))]
    verify_directory(read_manifest(fake, public), fake)
    assert "already whole" in run(*command).stderr
    (fake / "config.json").write_text("{}")
    repaired = run(*command)
    assert "anew" in repaired.stderr
    verify_directory(read_manifest(fake, public), fake)
    assert sorted(path.name for path in fake.parent.iterdir()) == ["fake"], "nothing is left behind"
