"""What a person sends along with a question: one file with everything that helps and nothing that is secret.

In it: what `doctor` found, the configuration without what may be secret, versions, and the ends of the logs. Not in it:
keys, certificates, the identity, join strings, prompts and answers. Home directories, host names and card numbers are
replaced, since they say who somebody is.
"""

import json
import os
import platform
import re
import socket
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from agent.doctor.check import Check
from agent.doctor.examine import as_json
from agent.logs import LogPlaces, last_lines

LOG_LINES = 500

# PEM blocks, join strings, what looks like a key or a token, and passwords in addresses.
_SECRETS = (
    (re.compile(r"(?i)\bauthorization\W.*"), "authorization: <removed>"),
    (re.compile(r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|\Z)", re.DOTALL), "<removed>"),
    (re.compile(r"slackwater(\+\w+)?://\S+"), "<join string>"),
    (
        re.compile(r"(?i)\b(\w*(?:token|secret|password|api_?key)\b\W{1,4})[^\s\"',}]+"),
        r"\1<removed>",
    ),
    (re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+@"), "<removed>@"),
    (re.compile(r"\bsk-[\w-]+|\b[A-Za-z0-9_-]{40,}={0,2}"), "<removed>"),
)
_PERSONAL = (
    (re.compile(r"/home/[^/\s\"']+"), "/home/<user>"),
    (re.compile(r"GPU-([0-9a-f]{8})-[0-9a-f-]{27}"), r"GPU-\1-..."),
)


def redact(text: str) -> str:
    """Return a text without secrets and without names of this machine's people."""
    for pattern, replacement in (*_PERSONAL, *_SECRETS):
        text = pattern.sub(replacement, text)
    host = socket.gethostname()
    return text.replace(host, "<host>") if len(host) > 2 else text


def write_bundle(path: Path, checks: Sequence[Check], config_path: Path, state_dir: Path | None) -> None:
    """Write the bundle as a zip file that only its maker can read.

    Args:
        state_dir: None where the configuration is not valid; then there are no logs in it.

    Raises:
        OSError: it cannot be written.
    """
    parts = {
        "doctor.json": json.dumps(as_json(checks), indent=1),
        "versions.json": json.dumps(_versions(), indent=1),
        "agent.toml": _read(config_path),
    }
    if state_dir is not None:
        for name, log in LogPlaces(state_dir).all().items():
            parts[f"logs/{name}"] = "\n".join(last_lines(log, LOG_LINES))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in parts.items():
            bundle.writestr(name, redact(text))


def _versions() -> dict[str, str]:
    return {
        "agent": version("slackwater-network"),
        "python": sys.version,
        "system": platform.platform(),
        "nvidia-ml-py": version("nvidia-ml-py"),
        "grpcio": version("grpcio"),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"# cannot be read: {error.strerror}\n"
