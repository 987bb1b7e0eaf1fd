"""Figures as inline SVG, drawn by hand: no library, nothing to load, colours from the page's own style sheet."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 84, 12, 40
_STRIP_WIDTH, _STRIP_HEIGHT, _BAR_HEIGHT = 160, 18, 11
_LABEL_GAP = 14.0
_MOST_TICKS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart.

    Args:
        label: Stands at its right end.
        values: One per round; NaN where there is none.
    """

    label: str
    values: Sequence[float]


def line_chart(
    lines: Sequence[Line], *, rounds: Sequence[int], title: str, reference: tuple[str, float] | None = None, top: float | None = None
) -> Markup:
    """Lines over rounds, from zero up.

    Args:
        lines: At most six: more cannot be told apart.
        rounds: Number of each round, ascending.
        title: What is shown, for those who cannot see it.
        reference: A level to compare with, and its name.
        top: Upper end of the vertical axis, if it is known.

    Raises:
        ValueError: If there are more than six lines, or a line has not one value per round.
    """
    if not 1 <= len(lines) <= 6 or any(len(line.values) != len(rounds) for line in lines):
        raise ValueError("expected one to six lines with one value per round")
    finite = [value for line in lines for value in line.values if math.isfinite(value)]
    levels = [*finite, *([reference[1]] if reference else [])]
    highest = top if top is not None else nice_ceiling(max(levels, default=1.0))
    span = max(1, rounds[-1] - rounds[0])

    def x(number: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (0.5 if len(rounds) == 1 else (number - rounds[0]) / span)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / highest

    parts = [_axes(highest, y=y, rounds=rounds, x=x)]
    labels: list[tuple[float, str, str]] = []
    if reference is not None:
        name, level = reference
        parts.append(Markup('<line class="reference" x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(_LEFT, _WIDTH - _RIGHT, y=_n(y(level))))
        labels.append((y(level), name, "muted"))
    for index, line in enumerate(lines):
        points = [(x(number), y(value)) for number, value in zip(rounds, line.values, strict=True) if math.isfinite(value)]
        if not points:
            continue
        style = f"s{index}"
        parts.append(Markup('<polyline class="line {}" points="{}"/>').format(style, " ".join(f"{_n(a)},{_n(b)}" for a, b in points)))
        if len(points) <= 25:
            parts += [Markup('<circle class="dot {}" cx="{}" cy="{}" r="2.5"/>').format(style, _n(a), _n(b)) for a, b in points]
        labels.append((points[-1][1], line.label, style))
    for position, text, style in _spread(labels):
        parts.append(Markup('<text class="label {}" x="{}" y="{}">{}</text>').format(style, _WIDTH - _RIGHT + 6, _n(position + 4), text))
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, title, Markup("").join(parts)
    )


def strip(*, value: float, low: float | None = None, high: float | None = None, mark: float | None = None, tone: str, title: str) -> Markup:
    """A bar from 0 to 1, with an interval and a mark on it.

    Args:
        value: Length of the bar.
        low: Lower end of an interval around the value.
        high: Upper end.
        mark: Where a comparison stands.
        tone: Class of its colour.
        title: What is shown, for those who cannot see it.
    """

    def x(share: float) -> str:
        return _n(1 + (_STRIP_WIDTH - 2) * min(1.0, max(0.0, share)))

    parts = [
        Markup('<rect class="track" x="1" y="2" width="{}" height="{}"/>').format(_STRIP_WIDTH - 2, _BAR_HEIGHT),
        Markup('<rect class="bar {}" x="1" y="2" width="{}" height="{}"/>').format(
            tone, _n((_STRIP_WIDTH - 2) * min(1.0, max(0.0, value))), _BAR_HEIGHT
        ),
    ]
    if low is not None and high is not None and high > low:
        parts.append(Markup('<line class="interval" x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(x(low), x(high), y=_STRIP_HEIGHT - 2))
    if mark is not None:
        parts.append(Markup('<line class="mark" x1="{x}" x2="{x}" y1="0" y2="{}"/>').format(_BAR_HEIGHT + 4, x=x(mark)))
    return Markup('<svg class="strip" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _STRIP_WIDTH, _STRIP_HEIGHT, title, Markup("").join(parts)
    )


def nice_ceiling(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below a positive value; 1 for zero.

    Example:
        >>> nice_ceiling(0.37), nice_ceiling(17_000)
        (0.5, 20000.0)
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def _axes(highest: float, *, y: Callable[[float], float], rounds: Sequence[int], x: Callable[[int], float]) -> Markup:
    parts: list[Markup] = []
    for share in (0.0, 0.5, 1.0):
        level = highest * share
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(_LEFT, _WIDTH - _RIGHT, y=_n(y(level))))
        parts.append(
            Markup('<text class="tick" text-anchor="end" x="{}" y="{}">{}</text>').format(_LEFT - 6, _n(y(level) + 4), compact(level))
        )
    every = -(-len(rounds) // _MOST_TICKS)
    for number in rounds[::every]:
        parts.append(
            Markup('<text class="tick" text-anchor="middle" x="{}" y="{}">{}</text>').format(_n(x(number)), _HEIGHT - _BOTTOM + 16, number)
        )
    parts.append(
        Markup('<text class="tick" text-anchor="middle" x="{}" y="{}">round</text>').format((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6)
    )
    return Markup("").join(parts)


def _spread(labels: list[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Moves labels down until none stands on another."""
    placed: list[tuple[float, str, str]] = []
    for position, text, style in sorted(labels):
        lowest = placed[-1][0] + _LABEL_GAP if placed else -math.inf
        placed.append((max(position, lowest), text, style))
    overflow = placed[-1][0] - (_HEIGHT - _BOTTOM) if placed else 0.0
    return [(position - max(0.0, overflow), text, style) for position, text, style in placed]


def compact(value: float) -> str:
    """A number in few characters.

    Example:
        >>> compact(0.25), compact(60_000), compact(1_500_000)
        ('0.25', '60k', '1.5M')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _n(value: float) -> str:
    return f"{value:.1f}"
