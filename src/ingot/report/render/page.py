"""The content of a report: a `ReportPage` of sections and blocks, which markup.py renders as HTML and as Markdown."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HeadlineFigure:
    """A figure of the headline. good: True shows the value in green, False in red, None without a color."""

    label: str
    value: str
    note: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class LabeledValues:
    """Labels with their values, one pair per line."""

    rows: list[tuple[str, str]]


@dataclass(frozen=True)
class TableBlock:
    """A table. right: the numbers of right-aligned columns, from 0. folded: only the caption shows until a reader opens
    the table."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: tuple[int, ...] = ()
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Bar:
    """A row of `Bars`. fraction: the length of the bar, 0 to 1. values: one per column of `Bars.header` after the
    first."""

    label: str
    fraction: float
    values: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Bars:
    header: tuple[str, ...]
    rows: list[Bar]


@dataclass(frozen=True)
class HeatRow:
    """A row of `HeatMap`. values: one per column after the first. levels: the shade of each, from -3 (far below the
    usual) to 3 (far above it). note: what is wrong with the row; "": nothing."""

    label: str
    values: tuple[str, ...]
    levels: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A table of shaded cells."""

    header: tuple[str, ...]
    rows: list[HeatRow]


@dataclass(frozen=True)
class Chart:
    """A chart. wide, narrow: the same chart as <svg> for wide and for narrow screens.

    legend: pairs (CSS class of a line, description). table: the figures of the chart, which Markdown shows instead.
    heat: what screens without charts show instead; None: the table.
    """

    title: str
    wide: str
    narrow: str
    legend: tuple[tuple[str, str], ...]
    table: TableBlock
    heat: HeatMap | None = None


@dataclass(frozen=True)
class Charts:
    """Small charts side by side."""

    charts: list[Chart]


@dataclass(frozen=True)
class Sample:
    """A text that a model wrote, or an excerpt of a document. prompt: the beginning, shown in bold."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Folded:
    """Blocks of which only the caption shows until a reader opens them."""

    caption: str
    blocks: "list[Block]"


Block = Text | LabeledValues | TableBlock | Bars | HeatMap | Chart | Charts | Sample | Folded


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class ReportPage:
    """The content of a page. command: the command at its top, with the line `about_command` above it. brand: what the
    page is."""

    title: str
    subtitle: str
    headline: list[HeadlineFigure]
    command: str
    sections: list[Section] = field(default_factory=list)
    footer: str = ""
    brand: str = "ingot report"
    about_command: str = "The command that reproduces it"
