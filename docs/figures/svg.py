"""Drawings as SVG text: a few shapes, one style sheet, colours that follow light and dark.

The repository shows a drawing as a picture, where the reader's system says which colours to take. The site puts it into
the page, where the page's switch does (docs/site/site.css).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

LIGHT = {"ink": "#1b1b1b", "soft": "#555555", "line": "#c8c8c8", "panel": "#f1f3f5", "blue": "#0072B2"}
DARK = {"ink": "#e8e8e8", "soft": "#b4b8be", "line": "#4a4f57", "panel": "#2a2e36", "blue": "#4ea8de"}
FIXED = {"orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73", "red": "#D55E00", "purple": "#CC79A7",
         "grey": "#9a9a9a"}
SERIES = ("blue", "orange", "green", "purple", "sky", "red", "grey")  # told apart by colour-blind readers, in order


def _colors(colors: dict[str, str]) -> str:
    return ";".join(f"--{name}:{color}" for name, color in colors.items())


STYLE = (f"svg.fig{{{_colors({**LIGHT, **FIXED})};font:13px system-ui,sans-serif}}"
         f"@media(prefers-color-scheme:dark){{svg.fig{{{_colors(DARK)}}}}}"
         "svg.fig text{fill:var(--ink)}svg.fig .soft{fill:var(--soft)}svg.fig .bold{font-weight:600}"
         "svg.fig .small{font-size:11px}svg.fig .rule{stroke:var(--line);fill:none}"
         "svg.fig .axis{stroke:var(--soft);fill:none}svg.fig .panel{fill:var(--panel)}"
         "svg.fig .wait{fill:var(--panel);stroke:var(--line);stroke-width:.6}"
         + "".join(f"svg.fig .{name}{{fill:var(--{name})}}svg.fig .s-{name}{{stroke:var(--{name});fill:none;"
                   "stroke-width:2}" for name in SERIES))


def number(value: float) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


def _attributes(more: dict[str, object]) -> str:
    return "".join(f' {name.rstrip("_").replace("_", "-")}="{number(value) if isinstance(value, float) else value}"'
                   for name, value in more.items())


class Drawing:
    """Shapes in the order in which they are painted; `label` says in words what the drawing shows."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self.style, self.parts = STYLE, [""]

    def rect(self, x: float, y: float, width: float, height: float, css: str, **more: object) -> None:
        self.parts.append(f'<rect x="{number(x)}" y="{number(y)}" width="{number(max(width, 0))}" '
                          f'height="{number(height)}" class="{css}"{_attributes(more)}/>')

    def text(self, x: float, y: float, content: str, css: str = "", **more: object) -> None:
        css = f' class="{css}"' if css else ""
        self.parts.append(f'<text x="{number(x)}" y="{number(y)}"{css}{_attributes(more)}>{escape(content)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str = "rule", **more: object) -> None:
        self.parts.append(f'<path d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}" class="{css}"'
                          f'{_attributes(more)}/>')

    def path(self, points: Sequence[tuple[float, float]], css: str, closed: bool = False, **more: object) -> None:
        steps = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.parts.append(f'<path d="M{steps}{"Z" * closed}" class="{css}"{_attributes(more)}/>')

    def circle(self, x: float, y: float, radius: float, css: str) -> None:
        self.parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" class="{css}"/>')

    def raw(self, text: str) -> None:
        self.parts.append(text)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]], width: float = 0) -> None:
        """Squares with names, from left to right."""
        for css, name in entries:
            self.rect(x, y - 10, 11, 11, css, rx=2)
            self.text(x + 16, y, name, "soft")
            x += width or 16 + 7.2 * len(name) + 14

    def svg(self) -> str:
        body = "\n".join(self.parts)
        return (f'<svg class="fig" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'role="img" aria-label="{escape(self.label)}">\n<style>{self.style}</style>{body}\n</svg>\n')
