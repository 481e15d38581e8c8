"""What honest output of a model looks like to a verifier: measured once, stored beside the manifest.

The file is no part of the signed manifest, which must not change when somebody
measures again; it names the manifest's digest instead, and is believed by the
coordinator in whose model directory it lies, and by nobody else.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from inference.model_files import CALIBRATION_FILE
from inference.rescoring import MARGIN_CLIP
from inference.task import ManifestDigest

__all__ = [
    "CALIBRATION_FILE",
    "Calibration",
    "CalibrationError",
    "HonestBound",
    "decode_calibration",
    "encode_calibration",
    "read_calibration",
]

Margin = Annotated[float, msgspec.Meta(gt=0, lt=MARGIN_CLIP)]


class CalibrationError(Exception):
    """A calibration is missing, damaged, or about another model; the text says which, and what to do."""


class HonestBound(msgspec.Struct, frozen=True, kw_only=True):
    """How large the mean clipped margin of honest output is at most, from one temperature on.

    Attributes:
        temperature: the bound holds from here up to the next one's.
        mean_margin: in nats; what the bets are made against.
        measured_mean: of the honest variant with the largest.
        block_variance: of the means of that variant's blocks, in squares of nats.
        tokens: measured, over all variants.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)]
    mean_margin: Margin
    measured_mean: float
    block_variance: float
    tokens: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one manifest, for re-scoring with one type of arithmetic.

    Attributes:
        dtype: what nodes may compute in.
        verifier: engine and type of the reference model.
        block_tokens: one bet is made for so many tokens.
        stakes: of the gamblers, in units of capital per unit of clipped margin; at most 1 / (bound / clip), where a
            block without any margin would take everything.
        bounds: by rising temperature.
        variants: how the honest output was made, for people.
    """

    manifest_digest: ManifestDigest
    model: str
    dtype: str
    verifier: str
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    stakes: Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], msgspec.Meta(min_length=1)]
    bounds: Annotated[tuple[HonestBound, ...], msgspec.Meta(min_length=1)]
    variants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        temperatures = [bound.temperature for bound in self.bounds]
        if temperatures != sorted(set(temperatures)) or temperatures[0] != 0.0:
            raise ValueError("bounds must begin at temperature 0 and rise")
        largest = max(bound.mean_margin for bound in self.bounds)
        if max(self.stakes) * largest >= MARGIN_CLIP:
            raise ValueError(f"a stake of {max(self.stakes):g} would lose everything in a block without margins")

    def bound(self, temperature: float) -> float:
        """Return the largest honest mean margin at a temperature, in nats: that of the two measured around it."""
        below = [bound for bound in self.bounds if bound.temperature <= temperature]
        above = [bound for bound in self.bounds if bound.temperature > temperature]
        nearest = [below[-1], *above[:1]] if below[-1].temperature != temperature else [below[-1]]
        return max(bound.mean_margin for bound in nearest)


def encode_calibration(calibration: Calibration) -> bytes:
    return msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n"


def decode_calibration(content: bytes) -> Calibration:
    """Return a calibration from JSON.

    Raises:
        CalibrationError: malformed, or a field that is not valid.
    """
    try:
        return msgspec.json.decode(content, type=Calibration)
    except msgspec.DecodeError as error:
        raise CalibrationError(
            f"no valid calibration: {error}; measure again with scripts/calibrate_model.py"
        ) from error


def read_calibration(directory: Path, digest: ManifestDigest) -> Calibration:
    """Return the calibration that lies in a model's directory.

    Raises:
        CalibrationError: unreadable, malformed, or made for another manifest.
    """
    path = directory / CALIBRATION_FILE
    try:
        calibration = decode_calibration(path.read_bytes())
    except OSError as error:
        raise CalibrationError(
            f"{path} cannot be read ({error.strerror}); measure it with scripts/calibrate_model.py"
        ) from error
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from error
    if calibration.manifest_digest != digest:
        raise CalibrationError(
            f"{path} was measured for {calibration.manifest_digest}, the model is {digest}; "
            f"measure it again with scripts/calibrate_model.py"
        )
    return calibration
