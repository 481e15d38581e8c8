"""What a manifest says of one file, and the chunks in which files are fetched. Pure."""

from dataclasses import dataclass

# What is fetched, checked and kept at a time: a cut-off fetch loses no more than this per stream. A model of a
# terabyte has 119,210 chunks, whose hashes just fit into the largest manifest (protos.signing.PAYLOAD_BYTES_MAX).
CHUNK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ManifestFile:
    path: str
    size_bytes: int
    sha256: bytes
    # SHA-256 of each CHUNK_BYTES in order; empty in manifests made before there were chunks.
    chunk_sha256: tuple[bytes, ...] = ()

    @property
    def has_chunk_hashes(self) -> bool:
        return len(self.chunk_sha256) == chunk_count(self.size_bytes)


def chunk_count(size_bytes: int) -> int:
    """Return in how many chunks a file of this size is fetched; an empty one has none."""
    return -(-size_bytes // CHUNK_BYTES)
