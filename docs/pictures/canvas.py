"""A canvas of SVG elements, written in the colours of light and of dark pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

__all__ = ["PALETTES", "Canvas"]

# Colour-blind safe (Okabe and Ito) for what tells owners apart; text meets 4.5:1 on its page.
PALETTES = {
    "light": {
        "ink": "#1f2328", "soft": "#59636e", "line": "#8c959f", "box": "#f6f8fa", "paper": "#ffffff",
        "blue": "#56b4e9", "orange": "#e69f00", "green": "#4db380", "red": "#c62828",
    },
    "dark": {
        "ink": "#e6edf3", "soft": "#9ea7b3", "line": "#6e7681", "box": "#21262d", "paper": "#0d1117",
        "blue": "#1f6aa5", "orange": "#8f5f00", "green": "#1a7040", "red": "#ff7b72",
    },
}  # fmt: skip


@dataclass
class Canvas:
    """Collects elements whose colours are names of the palette, as in ``{ink}``.

    Attributes:
        width: Of the drawing, in pixels.
        height: The same.
        title: What it shows, in one sentence, for whoever cannot see it.
    """

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, w: float, h: float, *,
        fill: str = "box", stroke: str = "line", dash: bool = False, r: float = 6,
    ) -> None:  # fmt: skip
        """A rectangle with round corners; `fill` may be "none"."""
        colour = "none" if fill == "none" else f"{{{fill}}}"
        dashes = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" fill="{colour}" '
            f'stroke="{{{stroke}}}"{dashes}/>'
        )

    def text(
        self, x: float, y: float, words: str, *,
        anchor: str = "middle", size: float = 14, colour: str = "ink", bold: bool = False,
    ) -> None:  # fmt: skip
        """A line of text with its baseline at `y`."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" '
            f'fill="{{{colour}}}"{weight}>{escape(words)}</text>'
        )

    def label(
        self, x: float, y: float, w: float, h: float, lines: list[str], **box: object
    ) -> None:
        """A box with lines of text in its middle, the first one bold."""
        self.box(x, y, w, h, **box)  # type: ignore[arg-type]
        top = y + h / 2 - (len(lines) - 1) * 8.5 + 5
        for number, line in enumerate(lines):
            first = number == 0
            self.text(
                x + w / 2, top + 17 * number, line,
                size=14 if first else 12, colour="ink" if first else "soft", bold=first,
            )  # fmt: skip

    def line(
        self, *points: tuple[float, float], colour: str = "line", arrow: bool = False,
        dash: bool = False, width: float = 1.5,
    ) -> None:  # fmt: skip
        """A line through points, with a head at its end if it is an arrow."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        head = f' marker-end="url(#{colour})"' if arrow else ""
        dashes = ' stroke-dasharray="5 4"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{{{colour}}}" '
            f'stroke-width="{width:g}"{dashes}{head}/>'
        )

    def svg(self, mode: str) -> str:
        """The drawing in the colours of "light" or "dark" pages."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="{{{name}}}"/></marker>'
            for name in ("line", "ink", "red")
        )
        body = "\n".join(self.parts)
        for name, colour in PALETTES[mode].items():
            heads = heads.replace(f"{{{name}}}", colour)
            body = body.replace(f"{{{name}}}", colour)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">\n"
            f"<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n{body}\n</svg>\n"
        )
