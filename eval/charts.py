"""Line charts as inline SVG.

Drawn here rather than by a plotting library because the page must follow the reader's light or dark theme, use the
page's own fonts, stay small and load nothing. Colours are CSS classes (templates/report.css), text is text. Models
are told apart by marker and dash as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

_CHARACTER_WIDTH = 6.6  # of tick labels, at the 12 px that the style sheet gives them
_TOP, _RIGHT, _BOTTOM = 16, 14, 46
_MAX_MARKERS = 16


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one model. `role` is its CSS class: before, converted or after."""

    role: str
    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """What an axis shows. `number` writes a value; `ticks` are chosen where not given."""

    label: str
    number: Callable[[float], str]
    scale: Literal["linear", "log"] = "linear"
    from_zero: bool = False
    ticks: Sequence[float] = ()


@dataclass(frozen=True)
class Limit:
    """A horizontal line across the chart with words above it."""

    value: float
    label: str


def line_chart(
    title: str, series: Sequence[Series], x: Axis, y: Axis, *, limit: Limit | None = None, width: int = 420
) -> Markup:
    """An <svg> that names and describes itself to a screen reader. Everything from outside is escaped.

    The title is also drawn on charts narrower than 400, which stand several to a figure.
    """
    named = width < 400
    top = _TOP + 20 * named
    height = 116 + top + width // 3
    xs = [point[0] for each in series for point in each.points]
    ys = [point[1] for each in series for point in each.points] + ([limit.value] if limit else [])
    x_ticks = x.ticks or _ticks(min(xs), max(xs), x)
    y_ticks = y.ticks or _ticks(0.0 if y.from_zero else min(ys), max(ys), y, outward=True)
    left = 12 + _CHARACTER_WIDTH * max(len(y.number(tick)) for tick in y_ticks)
    right, bottom = width - _RIGHT, height - _BOTTOM
    at_x = _placer(min(*xs, *x_ticks), max(*xs, *x_ticks), x, left + 8, right - 8)
    at_y = _placer(y_ticks[0], y_ticks[-1], y, bottom, top)

    description = "; ".join(
        f"{each.label}: {y.number(each.points[0][1])} at {x.number(each.points[0][0])}"
        + (f", {y.number(each.points[-1][1])} at {x.number(each.points[-1][0])}" if len(each.points) > 1 else "")
        for each in series
    )
    parts = [
        Markup('<svg class="chart" viewBox="0 0 {} {}" role="img"><title>{}</title><desc>{}.</desc>').format(
            width, height, title, description
        )
    ]
    if named:
        parts.append(_text("name start", 0, 14, title))
    for tick in y_ticks:
        parts.append(_line("grid", left, at_y(tick), right, at_y(tick)))
        parts.append(_text("tick end", left - 8, at_y(tick) + 4, y.number(tick)))
    parts.append(_line("axis", left, bottom, right, bottom))
    free_from = -math.inf
    for tick in x_ticks:
        half = _CHARACTER_WIDTH * len(x.number(tick)) / 2
        centre = min(at_x(tick), width - half - 2)
        parts.append(_line("axis", at_x(tick), bottom, at_x(tick), bottom + 4))
        if centre - half > free_from:
            parts.append(_text("tick", centre, bottom + 18, x.number(tick)))
            free_from = centre + half + 6
    parts.append(_text("label", (left + right) / 2, height - 6, x.label))
    if limit:
        parts.append(_line("limit", left, at_y(limit.value), right, at_y(limit.value)))
        parts.append(_text("limit", left + 8, at_y(limit.value) - 6, limit.label))
    for each in series:
        places = [(at_x(a), at_y(b)) for a, b in each.points]
        parts.append(Markup('<g class="{}">').format(each.role))
        parts.append(Markup('<polyline points="{}"/>').format(" ".join(f"{a:.1f},{b:.1f}" for a, b in places)))
        if len(places) <= _MAX_MARKERS:
            for (a, b), (value_x, value_y) in zip(places, each.points, strict=True):
                hint = f"{each.label}: {y.number(value_y)} at {x.number(value_x)}"
                parts.append(_marker(each.role, a, b, hint))
        parts.append(Markup("</g>"))
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def sample(role: str) -> Markup:
    """A short piece of a model's line with its mark, for a legend."""
    line = Markup('<g class="{}"><polyline points="1,6 29,6"/>{}</g>').format(role, _marker(role, 15, 6))
    return Markup('<svg viewBox="0 0 30 12" aria-hidden="true">{}</svg>').format(line)


def _marker(role: str, x: float, y: float, hint: str = "") -> Markup:
    """The mark of a model: a ring before, a diamond once converted, a disc after."""
    shape = {
        "before": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6"/>',
        "converted": f'<path d="M{x:.1f},{y - 5:.1f}l5,5l-5,5l-5,-5z"/>',
    }.get(role, f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2"/>')
    title = Markup("<title>{}</title>").format(hint) if hint else ""
    return Markup('<g class="marker {}">{}{}</g>').format(role, Markup(shape), title)


def _ticks(low: float, high: float, axis: Axis, outward: bool = False) -> list[float]:
    """Round values from low to high; with `outward` the first and the last enclose them."""
    if axis.scale == "log":
        return _log_ticks(low, high)
    least_step = ((high - low) or abs(high) or 1.0) / 4
    magnitude = 10.0 ** math.floor(math.log10(least_step))
    step = next(digit * magnitude for digit in (1, 2, 2.5, 5, 10) if digit * magnitude >= 0.999 * least_step)
    if outward:
        start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        stop = max(stop, start + 1)
    else:  # a round value just outside is welcome
        slack = 0.04 * (high - low) / step + 1e-9
        start, stop = math.ceil(low / step - slack), math.floor(high / step + slack)
    return [round(index * step, 12) for index in range(start, stop + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """The fewest of 1, 2, 5 or 1 of each decade, or of every n-th, that enclose low to high; at most 7."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1
    for digits, decades in ((1, 2, 5), 1), ((1,), 1), ((1,), (last - first) // 5 + 1):
        ticks = [digit * 10.0**exponent for exponent in range(first, last + decades, decades) for digit in digits]
        start = max(index for index, tick in enumerate(ticks) if tick <= low or index == 0)
        stop = min(index for index, tick in enumerate(ticks) if tick >= high)
        ticks = ticks[start : max(stop, start + 1) + 1]
        if len(ticks) <= 7:
            break
    return ticks


def _placer(low: float, high: float, axis: Axis, start: float, stop: float) -> Callable[[float], float]:
    """From a value of the axis to its place in the drawing."""
    scale = math.log if axis.scale == "log" else float
    span = scale(high) - scale(low)
    return lambda value: start + (stop - start) * ((scale(value) - scale(low)) / span if span else 0.5)


def _line(name: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(name, x1, y1, x2, y2)


def _text(name: str, x: float, y: float, words: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(name, x, y, words)
