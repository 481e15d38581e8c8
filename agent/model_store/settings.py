"""What an owner sets about models: the table [models] of the agent's configuration."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

# What is left for everything else on the disk: systems with less free behave badly.
FREE_FLOOR_BYTES_DEFAULT = 20_000_000_000
FREE_FLOOR_SHARE_DEFAULT = 0.10
MIRROR_SCHEMES = ("https", "http", "file")
# A fetch asks one after the other; nobody runs more.
MIRRORS_MAX = 32
# The bucket is one second of it; less would need minutes for one chunk and be no use to anybody.
BANDWIDTH_LIMIT_MIN = 64 * 1024


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where models lie, how much room they take, and where they come from."""

    # Where models are kept; default: `models` in state_dir.
    directory: Path | None = None
    quota_bytes: (
        Annotated[
            int, msgspec.Meta(ge=0, description="Bytes that models take at most; default: only the floor counts.")
        ]
        | None
    ) = None
    free_floor_bytes: (
        Annotated[
            int,
            msgspec.Meta(
                ge=0, description="Bytes of the disk that stay free; default: 20 GB, or 10 % where that is more."
            ),
        ]
        | None
    ) = None
    mirrors: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            max_length=MIRRORS_MAX,
            description=(
                "Folders to fetch from, best first: https://, http:// or file://. {name}, {revision} and {digest} are "
                "filled in; without any of them the model is looked for under its name."
            ),
        ),
    ] = ()
    hub: Annotated[
        bool, msgspec.Meta(description="Whether to fetch from the Hugging Face Hub where a model's origin is there.")
    ] = True
    bandwidth_limit_bytes_per_s: (
        Annotated[int, msgspec.Meta(ge=BANDWIDTH_LIMIT_MIN, description="What fetching may use of the line.")] | None
    ) = None
    pause_on_metered: Annotated[
        bool, msgspec.Meta(description="Whether fetching waits while the network is metered.")
    ] = True

    def __post_init__(self) -> None:
        for mirror in self.mirrors:
            parts = urlsplit(mirror)
            if parts.scheme not in MIRROR_SCHEMES or not (parts.netloc or parts.scheme == "file"):
                raise ValueError(f"mirror {mirror!r} is no https://, http:// or file:// address")
            if parts.scheme == "file" and not parts.path.startswith("/"):
                raise ValueError(f"mirror {mirror!r} needs an absolute path: file:///srv/models")
            if parts.password is not None:
                raise ValueError("a mirror's address may not contain a password: it would stand in logs")

    def free_floor(self, disk_bytes: int) -> int:
        """Return how many bytes of a disk of this size must stay free."""
        if self.free_floor_bytes is not None:
            return self.free_floor_bytes
        return max(FREE_FLOOR_BYTES_DEFAULT, int(disk_bytes * FREE_FLOOR_SHARE_DEFAULT))
