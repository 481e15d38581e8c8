"""Charts are well-formed, show what they are given where it belongs, and are the same each time."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.charts import BOTTOM, LEFT, RIGHT, TOP, Axis, Bars, Line, draw_bars, draw_lines

SVG = "{http://www.w3.org/2000/svg}"


def places(svg: str, index: int = 0) -> list[tuple[float, float]]:
    """Return the points of the curve with that number."""
    curves = [one.attrib["d"] for one in ElementTree.fromstring(svg).iter(f"{SVG}path") if one.get("class") == "curve"]
    drawn = [path for path in curves if not re.search(r"h24$", path)]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", drawn[index])]


def texts(svg: str) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_lines_run_from_corner_to_corner_of_their_axes() -> None:
    """Fails when y grows downwards."""
    svg = draw_lines("Title", Axis(label="x"), Axis(label="y"), [Line("one", [(0.0, 0.0), (10.0, 50.0)])])
    assert places(svg) == [(LEFT, BOTTOM), (RIGHT, TOP)]


def test_a_logarithmic_axis_gives_each_power_of_ten_the_same_room() -> None:
    line = Line("one", [(1.0, 0.0), (10.0, 0.5), (100.0, 1.0)])
    svg = draw_lines("Title", Axis(label="x", log=True), Axis(label="y", high=1.0), [line])
    (first, _), (second, _), (third, _) = places(svg)
    assert second - first == pytest.approx(third - second, abs=0.11)
    assert {"1", "10", "100"} <= set(texts(svg))


def test_what_is_written_is_escaped_and_all_of_it_is_there() -> None:
    svg = draw_lines(
        "a < b & c",
        Axis(label="time [s]"),
        Axis(label="share", high=1.0, percent=True),
        [Line("H100 & co", [(0.0, 1.0)]), Line("none", [])],
        mark=(0.0, "target"),
    )
    assert {"a < b & c", "time [s]", "share", "H100 & co", "none", "target", "100 %"} <= set(texts(svg))


def test_bars_stand_on_the_axis_and_are_as_high_as_their_values() -> None:
    svg = draw_bars("Cost", Axis(label="$"), ["a", "b"], [Bars("ours", [1.0, 2.0]), Bars("theirs", [0.0, 4.0])])
    boxes = [one.attrib for one in ElementTree.fromstring(svg).iter(f"{SVG}rect")]
    heights = [float(box["height"]) for box in boxes]
    assert heights == pytest.approx([(BOTTOM - TOP) * share for share in (0.25, 0.5, 0.0, 1.0)], abs=0.11)
    assert all(float(box["y"]) + float(box["height"]) == pytest.approx(BOTTOM, abs=0.11) for box in boxes)
    # Side by side, group by group.
    assert [float(boxes[at]["x"]) for at in (0, 2, 1, 3)] == sorted(float(box["x"]) for box in boxes)


def test_bars_without_a_value_for_each_group_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        draw_bars("Cost", Axis(label="$"), ["a", "b"], [Bars("ours", [1.0])])


@given(
    points=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), max_size=20),
    log=st.booleans(),
    steps=st.booleans(),
)
def test_any_points_make_a_chart_within_its_frame(points: list[tuple[float, float]], log: bool, steps: bool) -> None:
    """Fails without the cut at the ends of an axis (values of 0 on a logarithmic one)."""
    lines = [Line("one", points, steps=steps)]
    svg = draw_lines("Title", Axis(label="x", log=log), Axis(label="y"), lines)
    assert svg == draw_lines("Title", Axis(label="x", log=log), Axis(label="y"), lines)
    assert "nan" not in svg
    assert "inf" not in svg
    for x, y in places(svg) if points else []:
        assert LEFT <= x <= RIGHT
        assert TOP <= y <= BOTTOM
        assert math.isfinite(x + y)


def test_a_logarithmic_axis_keeps_the_ends_that_it_is_given_and_has_ticks_between() -> None:
    """Fails when given ends are moved to whole powers of ten."""
    line = Line("one", [(2.0, 0.0), (32.0, 1.0)])
    svg = draw_lines("Title", Axis(label="x", log=True, low=2.0, high=32.0), Axis(label="y"), [line])
    assert places(svg) == [(LEFT, BOTTOM), (RIGHT, TOP)]
    assert {"2", "5", "10", "20"} <= set(texts(svg))
    assert "50" not in texts(svg)


def test_lines_that_belong_together_share_a_colour_and_one_of_them_is_dashed() -> None:
    """Fails when the dashes are left out of the legend."""
    points = [(0.0, 1.0), (1.0, 2.0)]
    lines = [Line("ours", points, colour=3), Line("theirs", points, dashed=True, colour=3)]
    svg = draw_lines("Title", Axis(label="x"), Axis(label="y"), lines)
    curves = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}path") if one.get("class") == "curve"]
    assert len({one.get("stroke") for one in curves}) == 1
    assert [one.get("stroke-dasharray") for one in curves] == [None, None, "6 4", "6 4"]
