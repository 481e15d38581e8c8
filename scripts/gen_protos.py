"""Generate the Python code of protos/ and the SDK's private copy of it.

The .proto files import each other as slackwater/..., and the SDK's import name
is slackwater. So imports are rewritten to paths from the repository root
(protos.slackwater...), and the SDK, which may not depend on a package with so
general a name as `protos`, carries the same files as slackwater._protos.

`--check` writes nothing and fails where the committed files differ.
"""

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
# mypy-protobuf's plugins stand beside the interpreter, which need not be on PATH.
PLUGINS = Path(sys.executable).parent
SDK = ROOT / "sdk" / "slackwater" / "_protos"

GENERATED = re.compile(r"^(from|import) slackwater\.(common|node|task|fleet)\b", re.MULTILINE)
STUB_REFERENCE = re.compile(r"(?<![.\w/\"'])slackwater\.(common|node|task|fleet)\.v1\.(\w+_pb2)")
# What a client checks by itself: signatures, and the ledger's log.
HANDWRITTEN = ("signing.py", "merkle.py", "checkpoint.py", "receipt.py")
SDK_DOCSTRING = '"""The wire contract; a copy made by scripts/gen_protos.py of what lies in protos/."""\n'


def compile_into(target: Path) -> None:
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--grpc_python_out={target}",
        f"--plugin=protoc-gen-mypy={PLUGINS / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={PLUGINS / 'protoc-gen-mypy_grpc'}",
        f"--mypy_grpc_out=quiet:{target}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed; its messages are above")


def rewrite(source: str, package: str) -> str:
    source = GENERATED.sub(rf"\1 {package}.slackwater.\2", source)
    return STUB_REFERENCE.sub(rf"{package}.slackwater.\1.v1.\2", source)


def generate() -> dict[Path, str]:
    """Return every generated file of the repository with the text it should have."""
    wanted: dict[Path, str] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        compile_into(scratch)
        for made in sorted(scratch.rglob("*_pb2*")):
            for target, package in ((PROTOS, "protos"), (SDK, "slackwater._protos")):
                wanted[target / made.relative_to(scratch)] = rewrite(made.read_text(), package)
    wanted[SDK / "__init__.py"] = SDK_DOCSTRING
    for name in HANDWRITTEN:
        wanted[SDK / name] = (PROTOS / name).read_text().replace("from protos.", "from slackwater._protos.")
    return wanted


def existing() -> set[Path]:
    """Return the files that generation owns: code of protos, and all of the SDK's copy."""
    own = {path for path in PROTOS.rglob("*_pb2*") if path.suffix in {".py", ".pyi"}}
    return own | {path for path in SDK.rglob("*") if path.suffix in {".py", ".pyi"}}


def differences(wanted: dict[Path, str]) -> list[str]:
    """Return one line for each file that is missing, left over or other than generated."""
    found = [f"{path.relative_to(ROOT)}: no .proto makes it any more" for path in existing() - wanted.keys()]
    for path, text in wanted.items():
        if not path.exists():
            found.append(f"{path.relative_to(ROOT)}: missing")
        elif path.read_text() != text:
            found.append(f"{path.relative_to(ROOT)}: differs from what the protos give")
    return sorted(found)


def main() -> None:
    wanted = generate()
    if sys.argv[1:] == ["--check"]:
        found = differences(wanted)
        if found:
            sys.exit("\n".join([*found, "run `make protos` and commit the result"]))
        return
    for path in existing() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
