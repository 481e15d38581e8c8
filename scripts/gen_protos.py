"""Generate the Python code of protos/ and the SDK's private copy of it.

The .proto files import each other as slackwater/..., and the SDK's import name
is slackwater. So imports are rewritten to paths from the repository root
(protos.slackwater...), and the SDK, which may not depend on a package with so
general a name as `protos`, carries the same files as slackwater._protos.
"""

import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
# mypy-protobuf's plugins stand beside the interpreter, which need not be on PATH.
SCRIPTS = Path(sys.executable).parent
SDK = ROOT / "sdk" / "slackwater" / "_protos"

GENERATED = re.compile(r"^(from|import) slackwater\.(common|node|task|fleet)\b", re.MULTILINE)
STUB_REFERENCE = re.compile(r"(?<![.\w/\"'])slackwater\.(common|node|task|fleet)\.v1\.(\w+_pb2)")


def compile_into(target: Path) -> None:
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--grpc_python_out={target}",
        f"--plugin=protoc-gen-mypy={SCRIPTS / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={SCRIPTS / 'protoc-gen-mypy_grpc'}",
        f"--mypy_grpc_out=quiet:{target}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed; its messages are above")


def rewrite(source: str, package: str) -> str:
    source = GENERATED.sub(rf"\1 {package}.slackwater.\2", source)
    return STUB_REFERENCE.sub(rf"{package}.slackwater.\1.v1.\2", source)


def replace_generated(scratch: Path, target: Path, package: str) -> None:
    for old in target.rglob("*_pb2*"):
        old.unlink()
    for new in sorted(scratch.rglob("*_pb2*")):
        destination = target / new.relative_to(scratch)
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.write_text(rewrite(new.read_text(), package))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        compile_into(scratch)
        replace_generated(scratch, PROTOS, "protos")
        if SDK.exists():
            shutil.rmtree(SDK)
        replace_generated(scratch, SDK, "slackwater._protos")
    (SDK / "__init__.py").write_text('"""The wire contract; a copy made by scripts/gen_protos.py of what lies in protos/."""\n')
    signing = (PROTOS / "signing.py").read_text()
    (SDK / "signing.py").write_text(signing.replace("from protos.", "from slackwater._protos."))


if __name__ == "__main__":
    main()
