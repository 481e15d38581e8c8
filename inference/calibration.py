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
from inference.score_check import DISTANCE_MAX
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


class CalibrationError(Exception):
    """A calibration is missing, damaged, or about another model; the text says which, and what to do."""


class HonestBound(msgspec.Struct, frozen=True, kw_only=True):
    """How large the margins of honest output are at most, on average, at one temperature.

    Attributes:
        mean_square: of clipped margins, in squares of nats: what the bets are made against, with the allowance for
            what was not measured already in it.
        measured_square: the same of the honest variant with the largest, as measured.
        mean_margin: of that variant, in nats, for people.
        block_variance: of the mean squares of that variant's blocks.
        tokens: measured, over all variants.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)]
    mean_square: Annotated[float, msgspec.Meta(gt=0, lt=MARGIN_CLIP**2)]
    measured_square: float
    mean_margin: float
    block_variance: float
    tokens: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one manifest, for re-scoring with one type of arithmetic.

    Attributes:
        dtype: what nodes may compute in.
        verifier: engine and type of the reference model.
        block_tokens: one bet is made for so many tokens.
        candidates: that the reference model names for each id; a longer list shows larger margins, of honest output
            too, so that whoever judges by this calibration asks for no more.
        stakes: of the gamblers: what share of its capital each loses in a block without any margin.
        bounds: by rising temperature.
        score_distance_max: beyond it scores were not computed with this model (`inference.score_check`).
        variants: how the honest output was made, for people.
    """

    manifest_digest: ManifestDigest
    model: str
    dtype: str
    verifier: str
    # 20 in files of before there were more.
    candidates: Annotated[int, msgspec.Meta(ge=5, le=64)] = 20
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    stakes: Annotated[tuple[Annotated[float, msgspec.Meta(gt=0, lt=1)], ...], msgspec.Meta(min_length=1)]
    bounds: Annotated[tuple[HonestBound, ...], msgspec.Meta(min_length=1)]
    score_distance_max: Annotated[float, msgspec.Meta(gt=0, le=2 * DISTANCE_MAX)] = DISTANCE_MAX
    variants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        temperatures = [bound.temperature for bound in self.bounds]
        if temperatures != sorted(set(temperatures)) or temperatures[0] != 0.0:
            raise ValueError("bounds must begin at temperature 0 and rise")

    def bound(self, temperature: float) -> float:
        """Return the largest honest mean square at a temperature, in squares of nats.

        Between two measured temperatures that is the larger of both. Above the last it is the last: the same error of
        the arithmetic turns fewer draws the more noise there is.
        """
        below = [bound for bound in self.bounds if bound.temperature <= temperature]
        above = [bound for bound in self.bounds if bound.temperature > temperature]
        nearest = [below[-1]] if below[-1].temperature == temperature else [below[-1], *above[:1]]
        return max(bound.mean_square for bound in nearest)


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
