"""A played session as one picture: what was heard and seen, when the assistant listened and spoke, and its words.

A row is a minute (less if the session is shorter), and a row is made of lanes. Inside a row both axes are plain
lengths: seconds to the right, inches upwards.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import font_manager, ft2font
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from venus_jax.config import SAMPLE_RATE

if TYPE_CHECKING:
    from venus_jax.playback import Step

ROW_SECONDS, MOST_ROWS = 60, 60
LEFT, RIGHT, TOP, GAP = 0.9, 0.2, 0.85, 0.42  # inches around and between rows
WIDTH = 16.0  # of a row, inches
LANES = {"seen": 0.62, "heard": 0.66, "typed": 0.2, "background": 0.2, "delegate": 0.2, "assistant": 0.2, "words": 0.7}
POINTS, LINE, COLUMN = 7.5, 0.13, 0.062  # small print: size, inches of a line, inches of a narrow character
WORDS_WIDTH = 1.2  # inches a paragraph of words has at least, so that words stay near their moment
COLORS = {"heard": "#4c78a8", "listen": "#e4e7ea", "speak": "#f2883c", "typed": "#2f5d8c", "background": "#2e8b57",
          "delegate": "#8e44ad", "flush": "#d62728", "end": "#333333"}
_text = operator.attrgetter("unit.text")
NOTES = {"typed": operator.attrgetter("typed"), "background": operator.attrgetter("background"),
         "delegate": operator.attrgetter("unit.delegate")}  # lanes of words at a moment


def draw(path: str | os.PathLike, title: str, sound: np.ndarray, steps: Sequence[Step], unit_seconds: float) -> None:
    """Writes the picture as PNG.

    Args:
      title: its heading.
      sound: what was heard, float32 [N], 16 kHz.
      steps: the units in order.
      unit_seconds: their length.
    """
    length = len(steps) * unit_seconds
    row_seconds = length if length <= ROW_SECONDS else ROW_SECONDS * math.ceil(length / ROW_SECONDS / MOST_ROWS)
    used = {"seen": any(step.thumbnails for step in steps)}
    used |= {name: any(map(words, steps)) for name, words in NOTES.items()}
    lanes, top = {}, 0.0  # lane -> (bottom, height), inches from the row's bottom
    for name in reversed(LANES):
        if used.get(name, True):
            lanes[name] = top, LANES[name]
            top += LANES[name]
    rows = math.ceil(length / row_seconds - 1e-9)
    width, height = LEFT + WIDTH + RIGHT, TOP + rows * (top + GAP)
    print_ = _Print(set(title).union(*(words(step) for step in steps for words in (_text, *NOTES.values()))))
    sound = sound / max(np.abs(sound).max(initial=0), 1e-3)
    figure = Figure(figsize=(width, height), dpi=130)
    figure.text(LEFT / width, 1 - 0.3 / height, print_.clean(title), fontfamily=print_.families, fontsize=13,
                fontweight="bold", va="center", parse_math=False)
    figure.legend(handles=_legend(steps, used), loc="center left", ncols=10, frameon=False, fontsize=8, borderaxespad=0,
                  bbox_to_anchor=(LEFT / width, 1 - 0.6 / height), handlelength=1.2, columnspacing=1.6)
    for row in range(rows):
        bottom = height - TOP - row * (top + GAP) - top
        axes = figure.add_axes((LEFT / width, bottom / height, WIDTH / width, top / height))
        axes.set(xlim=(row * row_seconds, (row + 1) * row_seconds), ylim=(0, top),
                 yticks=[low + high / 2 for low, high in lanes.values()], yticklabels=lanes)
        axes.tick_params(labelsize=8, length=0)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 5, 6, 10], integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(_clock))
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        _row(axes, lanes, sound, steps, unit_seconds, print_)
    figure.savefig(path, format="png")


def _row(axes: Axes, lanes: dict[str, tuple[float, float]], sound: np.ndarray, steps: Sequence[Step],
         unit_seconds: float, print_: _Print) -> None:
    """Everything that begins in the seconds of these axes."""
    begin, end = axes.get_xlim()
    scale = WIDTH / (end - begin)  # inches a second
    steps = [step for step in steps if begin - 1e-6 <= step.seconds < end - 1e-6]

    _envelope(axes, sound, *lanes["heard"])
    if begin < len(sound) / SAMPLE_RATE < end:
        axes.axvline(len(sound) / SAMPLE_RATE, color=COLORS["end"], linewidth=0.8, linestyle=":")
    if "seen" in lanes:
        _film(axes, steps, *lanes["seen"], scale)
    low, high = lanes["assistant"]
    for state, group in itertools.groupby(steps, key=lambda step: step.unit.state):
        run = list(group)
        axes.broken_barh([(run[0].seconds, len(run) * unit_seconds)], (low, high), color=COLORS[state], linewidth=0)
    for step in steps:
        if step.unit.end_of_turn:
            axes.plot([step.seconds + unit_seconds] * 2, [low, low + high], color=COLORS["end"], linewidth=2)
        if step.unit.flush:
            axes.plot(step.seconds + unit_seconds / 2, low + high / 2, "X", color=COLORS["flush"], markersize=8)
    for name, words in NOTES.items():
        if name in lanes:
            said = {step.seconds: words(step) for step in steps if words(step)}
            _notes(axes, said, *lanes[name], COLORS[name], scale, print_)
    _words(axes, steps, lanes["words"], unit_seconds, scale, print_)


def _envelope(axes: Axes, sound: np.ndarray, low: float, high: float) -> None:
    """The loudest and lowest sample of every few milliseconds, between the lane's edges."""
    begin, end = axes.get_xlim()
    edges = (np.linspace(begin, end, 2000) * SAMPLE_RATE).astype(int)
    edges = edges[edges < len(sound)]
    if len(edges) < 2:
        return
    part, starts = sound[edges[0]:edges[-1] + 1], edges[:-1] - edges[0]
    top, bottom = (extreme.reduceat(part, starts) for extreme in (np.maximum, np.minimum))
    middle, half = low + high / 2, 0.46 * high
    axes.fill_between(edges[:-1] / SAMPLE_RATE, middle + half * bottom, middle + half * top, color=COLORS["heard"],
                      linewidth=0.3)


def _film(axes: Axes, steps: Sequence[Step], low: float, high: float, scale: float) -> None:
    """As many pictures as have room."""
    free = -math.inf
    for step in steps:
        for picture in step.thumbnails[:1]:
            top, begin = low + 0.9 * high, step.seconds
            end = begin + (top - low) * picture.shape[1] / picture.shape[0] / scale
            if begin >= free - 1e-6 and end <= axes.get_xlim()[1]:
                axes.imshow(picture, extent=(begin, end, low, top), aspect="auto", zorder=2)
                free = end + 0.05 / scale


def _notes(axes: Axes, said: dict[float, str], low: float, high: float, color: str, scale: float,
           print_: _Print) -> None:
    """A mark at each moment and as much of the words behind it as there is room before the next."""
    moments = sorted(said)
    for moment, following in zip(moments, [*moments[1:], axes.get_xlim()[1]]):
        axes.plot(moment + 0.06 / scale, low + high / 2, "o", color=color, markersize=4)
        print_(axes, moment + 0.14 / scale, low + high / 2, said[moment], (following - moment) * scale - 0.16, 1,
               color=color, va="center")


def _words(axes: Axes, steps: Sequence[Step], lane: tuple[float, float], unit_seconds: float, scale: float,
           print_: _Print) -> None:
    """Paragraphs below the units that said them; what follows the last of a turn is free for it."""
    (low, high), end = lane, axes.get_xlim()[1]
    most = max(1, math.ceil(WORDS_WIDTH / scale / unit_seconds))  # units of a paragraph
    paragraphs: list[tuple[float, str]] = []
    for _, group in itertools.groupby(steps, key=lambda step: step.unit.state):
        run = list(group)
        for at in range(0, len(run), most):
            begin, text = run[at].seconds, "".join(map(_text, run[at:at + most]))
            if at and (end - begin) * scale < WORDS_WIDTH:  # too near the row's end for its own
                begin, text = paragraphs[-1][0], paragraphs.pop()[1] + text
            paragraphs.append((begin, text))
    paragraphs = [(begin, text) for begin, text in paragraphs if text]
    for (begin, text), following in zip(paragraphs, [*(begin for begin, _ in paragraphs[1:]), end]):
        print_(axes, begin, low + high - 0.03, text, (following - begin) * scale - 0.05, int(high / LINE), va="top")


class _Print:
    """Small print with whatever fonts this machine has; what none of them covers is counted, not drawn as boxes."""

    def __init__(self, characters: set[str]):
        self.families, self._missing = _fonts(characters)

    def clean(self, text: str) -> str:
        """One line without characters that cannot be drawn."""
        text = "".join(c if c.isprintable() else " " for c in text)
        parts = []
        for missing, group in itertools.groupby(text, key=self._missing.__contains__):
            part = "".join(group)
            parts.append(f"[{len(part)}\u00a0characters]" if missing else part)
        return "".join(parts).strip()

    def __call__(self, axes: Axes, x: float, y: float, text: str, width: float, lines: int, **style) -> None:
        """Writes text into so many inches and lines; an ellipsis stands for the rest."""
        wide = lambda c: unicodedata.east_asian_width(c) in "WFA"
        # textwrap counts characters: a wide one gets a companion that is taken away again
        padded = "".join(c + "\0" * wide(c) for c in self.clean(text))
        wrapped = textwrap.wrap(padded, max(2, int(width / COLUMN)), max_lines=lines, placeholder="…",
                                break_on_hyphens=False)
        axes.text(x, y, "\n".join(wrapped).replace("\0", ""), fontsize=POINTS, fontfamily=self.families,
                  linespacing=72 * LINE / POINTS / 1.2, parse_math=False, clip_on=True, **style)


def _fonts(characters: set[str]) -> tuple[list[str], set[str]]:
    """Families that draw these characters, the usual one first, and the characters that no font here has."""
    families, missing = ["DejaVu Sans"], {c for c in characters if c.isprintable()}
    missing -= _covered(font_manager.findfont("DejaVu Sans"), missing)
    fonts = {}
    if missing:  # a look into every font takes seconds
        fonts = {font.name: _covered(font.fname, missing) for font in font_manager.fontManager.ttflist
                 if "lastresort" not in font.name.lower().replace(" ", "")}  # boxes for everything
    while missing and fonts:
        best = max(sorted(fonts), key=lambda name: len(fonts[name] & missing))
        if not fonts[best] & missing:
            break
        families.append(best)
        missing -= fonts.pop(best)
    return families, missing


def _covered(file: str, characters: set[str]) -> set[str]:
    with contextlib.suppress(RuntimeError, OSError):
        font = ft2font.FT2Font(file)
        if font.scalable:  # not a font of pictures
            return characters & {chr(code) for code in font.get_charmap()}
    return set()


def _clock(seconds: float, _) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _legend(steps: Sequence[Step], used: dict[str, bool]) -> list:
    """What the colours and marks mean, of those that occur."""
    patches = {"heard": "user's sound", "listen": "assistant listens", "speak": "assistant speaks"}
    marks = {"end": ("|", "end of its turn", any(step.unit.end_of_turn for step in steps)),
             "flush": ("X", "floor lost, queued sound dropped", any(step.unit.flush for step in steps)),
             "typed": ("o", "user types", used["typed"]),
             "background": ("o", "background reply comes in", used["background"]),
             "delegate": ("o", "request to the background", used["delegate"])}
    return [*(Patch(color=COLORS[name], label=label) for name, label in patches.items()),
            *(Line2D([], [], color=COLORS[name], marker=marker, linestyle="", label=label)
              for name, (marker, label, there) in marks.items() if there),
            Line2D([], [], color=COLORS["end"], linestyle=":", label="input ends")]
