"""Boxes, words and arrows, as SVG or as PNG; what all pictures have in common."""
import pathlib
from dataclasses import dataclass
from xml.sax.saxutils import escape

FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"
LETTER = 0.602  # a letter's width by the font's size
LINE = 1.35  # a line's height, likewise
# Light enough for black letters; neighbours differ in hue, and every second one in lightness.
COLOURS = ("#cfe3f7", "#fbd9b5", "#cdebcb", "#f5c6c6", "#ded0ee", "#f7edb5", "#c9ecec", "#eed3e3")
GREY, WHITE, BLACK = "#e4e4e4", "#ffffff", "#222222"


@dataclass(frozen=True)
class Box:
    """x, y: the upper left corner."""

    x: float
    y: float
    width: float
    height: float
    fill: str = WHITE
    dashed: bool = False


@dataclass(frozen=True)
class Words:
    """One line; x, y: the middle of its left end, of its middle or of its right end, as ``anchor`` says."""

    x: float
    y: float
    text: str
    anchor: str = "start"  # or "middle", "end"
    bold: bool = False
    size: float = 12


@dataclass(frozen=True)
class Arrow:
    """From one point to another, with a head there."""

    x1: float
    y1: float
    x2: float
    y2: float


def width_of(text: str, size: float = 12) -> float:
    return len(text) * size * LETTER


class Picture:
    """What ``tkq.viz`` returns. A subclass has ``text()`` and ``shapes()``: (width, height, what to draw)."""

    def text(self) -> str:
        """For a terminal."""
        raise NotImplementedError

    def shapes(self) -> tuple:
        raise NotImplementedError

    def svg(self) -> str:
        """A whole SVG document."""
        width, height, shapes = self.shapes()
        body = "\n".join(map(_svg, shapes))
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
                f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}">\n'
                f'<rect width="100%" height="100%" fill="{WHITE}"/>\n{body}\n</svg>\n')

    def save(self, path) -> None:
        """Write .svg, .txt or .png, by the name's end.

        Raises:
            ValueError: another end.
            ImportError: .png without matplotlib.
        """
        path = pathlib.Path(path)
        if path.suffix == ".png":
            _save_png(self, path)
        elif path.suffix in (".svg", ".txt"):
            path.write_text(self.svg() if path.suffix == ".svg" else self.text() + "\n", encoding="utf-8")
        else:
            raise ValueError(f"save: path is {str(path)!r}, allowed are names that end in .svg, .txt and .png")

    def _repr_svg_(self) -> str:  # IPython asks for it
        return self.svg()

    def __str__(self):
        return self.text()


def _svg(shape) -> str:
    if isinstance(shape, Box):
        dashes = ' stroke-dasharray="3 2"' if shape.dashed else ""
        return (f'<rect x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}" '
                f'fill="{shape.fill}" stroke="{BLACK}" stroke-width="0.7"{dashes}/>')
    if isinstance(shape, Words):
        weight = ' font-weight="bold"' if shape.bold else ""
        return (f'<text x="{shape.x:g}" y="{shape.y + 0.35 * shape.size:g}" font-size="{shape.size:g}" '
                f'text-anchor="{shape.anchor}" fill="{BLACK}" xml:space="preserve"{weight}>{escape(shape.text)}</text>')
    head = " ".join(f"{x:g},{y:g}" for x, y in head_of(shape))
    return (f'<line x1="{shape.x1:g}" y1="{shape.y1:g}" x2="{shape.x2:g}" y2="{shape.y2:g}" stroke="{BLACK}"/>'
            f'<polygon points="{head}" fill="{BLACK}"/>')


def head_of(arrow: Arrow, size: float = 6) -> list:
    """The corners of an arrow's head."""
    dx, dy = arrow.x2 - arrow.x1, arrow.y2 - arrow.y1
    length = (dx * dx + dy * dy) ** 0.5
    dx, dy = size * dx / length, size * dy / length
    x, y = arrow.x2 - dx, arrow.y2 - dy
    return [(arrow.x2, arrow.y2), (x - dy / 2, y + dx / 2), (x + dy / 2, y - dx / 2)]


def _save_png(picture, path):
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Polygon, Rectangle
    except ImportError as problem:
        raise ImportError("save: a .png is drawn by matplotlib, which is not installed (pip install matplotlib); "
                          ".svg and .txt need nothing") from problem
    width, height, shapes = picture.shapes()
    figure = Figure(figsize=(width / 100, height / 100), dpi=200)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    with matplotlib.rc_context({"font.family": ["DejaVu Sans Mono", "monospace"]}):
        for s in shapes:
            if isinstance(s, Box):
                axes.add_patch(Rectangle((s.x, s.y), s.width, s.height, facecolor=s.fill, edgecolor=BLACK,
                                         linewidth=0.5, linestyle="--" if s.dashed else "-"))
            elif isinstance(s, Words):  # a point is 1/72 inch, and 100 of the picture's units are an inch
                align = {"start": "left", "middle": "center", "end": "right"}[s.anchor]
                axes.text(s.x, s.y, s.text, fontsize=0.72 * s.size, ha=align, va="center_baseline", color=BLACK,
                          fontweight="bold" if s.bold else "normal", parse_math=False)
            else:
                axes.plot((s.x1, s.x2), (s.y1, s.y2), color=BLACK, linewidth=0.7)
                axes.add_patch(Polygon(head_of(s), color=BLACK))
        figure.savefig(path, facecolor=WHITE)
