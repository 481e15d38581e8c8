"""Names that other programs choose, made fit for a log and a terminal."""

# A name and a reason; more is somebody's novel.
CHARACTERS_MAX = 100


def printable(text: str, characters_max: int = CHARACTERS_MAX) -> str:
    """Return a text without control and formatting characters, cut to a length.

    An inhibitor named with escape sequences would otherwise rewrite the owner's terminal in `status`.
    """
    cleaned = "".join(character if character.isprintable() else " " for character in text[: 4 * characters_max])
    cleaned = " ".join(cleaned.split())
    return cleaned if len(cleaned) <= characters_max else cleaned[: characters_max - 1] + "…"
