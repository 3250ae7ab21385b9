"""What a report is made of, before it is HTML or Markdown: both are renderings of one `Page`."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tile:
    """One figure of the headline. `good`: True and False colour it, None does not judge."""

    label: str
    value: str
    note: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Pairs:
    """Label and value, one under the other."""

    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """right: columns (0-based) of numbers. folded: hidden behind its caption until it is opened."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: tuple[int, ...] = ()
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Bar:
    """fraction: length, 0 to 1. values: one per column of `Bars.header` after the first."""

    label: str
    fraction: float
    values: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Bars:
    header: tuple[str, ...]
    rows: list[Bar]


@dataclass(frozen=True)
class Chart:
    """wide and narrow: the same SVG for wide and for narrow screens. table: its figures, for Markdown and for readers
    that cannot see it."""

    title: str
    wide: str
    narrow: str
    legend: tuple[tuple[str, str], ...]  # (class of the line, what it is)
    table: Table


@dataclass(frozen=True)
class Charts:
    """Small charts side by side."""

    charts: list[Chart]


@dataclass(frozen=True)
class Sample:
    prompt: str
    text: str
    note: str = ""


Block = Text | Code | Pairs | Table | Bars | Chart | Charts | Sample


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    tiles: list[Tile]
    command: str
    sections: list[Section] = field(default_factory=list)
    footer: str = ""
