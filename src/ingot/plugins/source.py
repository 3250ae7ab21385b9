"""Sources: the formats of the inputs of a data build."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ingot.errors import ConfigError
from ingot.plugins.registry import Part, Reference, Registry
from ingot.schema.corpus import Document, Drop

Records = Iterator[tuple[Document, Drop | None]]


class ReadLimits(Protocol):
    """Sizes beyond which a reader drops a record. body_bytes: of a document; longer ones are dropped after reading."""

    @property
    def body_bytes(self) -> int: ...


class Reader(Protocol):
    """A function that reads one file."""

    def __call__(self, path: Path, name: str, source: str, limits: ReadLimits, settings: Any, /) -> Records: ...


@dataclass(frozen=True, kw_only=True)
class InputFormat(Part):
    """A format of files, chosen by the ending of a file's name or by format=NAME after --source.

    read: a Reader. It yields (document, None), or (document, Drop("read", "read.RULE", value)) for a record that cannot
      be used, always in the same order and in constant memory: after a crash the input is read again from its start,
      and a record at which workers died repeatedly is left out by its number.
      path: a local file. name, source: `file` and `source` of every document; ids come from document_id(name, ...).
      A document has its text in `raw`, with `content_type` "text/plain" or "text/html" and `charset`.
      settings: an instance of `settings`, from [format.NAME] of the recipe; None without settings.
      It raises DataError for a file that is damaged or has another format: the rest of the file is left out.
    endings: of file names, without the dot. packed: the reader also unpacks files that end in .gz and .zst.
    """

    read: Reference
    endings: tuple[str, ...] = ()
    packed: bool = False


class FormatRegistry(Registry[InputFormat]):
    """The registry of formats, in which every ending of a file name belongs to one format."""

    def register(self, part: InputFormat) -> InputFormat:
        others = [entry.part for entry in self.entries() if entry.part.name != part.name]
        taken = {ending: other.name for other in others for ending in other.endings}
        for ending in part.endings:
            if ending in taken:
                raise ConfigError(
                    "E-FORMAT-ENDING",
                    f"format {part.name!r} claims files that end in .{ending}, which are {taken[ending]}",
                    rule="an ending belongs to one format",
                    fix=f"remove the ending, and name the format of such files: --source NAME FILES format={part.name}",
                    name=part.name,
                    ending=ending,
                )
        return super().register(part)


FORMATS = FormatRegistry(
    "format",
    "format=NAME",
    (
        InputFormat(name="warc", read="ingot.data.sources.warc:read_crawl", endings=("warc", "wat"), packed=True),
        InputFormat(name="wet", read="ingot.data.sources.warc:read_crawl", endings=("wet",), packed=True),
        InputFormat(name="text", read="ingot.data.sources.text:read_text", endings=("txt", "text"), packed=True),
        InputFormat(
            name="jsonl",
            read="ingot.data.sources.text:read_jsonl",
            endings=("jsonl", "json", "ndjson"),
            packed=True,
        ),
        InputFormat(name="parquet", read="ingot.data.sources.parquet:read_parquet", endings=("parquet",), packed=True),
        InputFormat(name="tar", read="ingot.data.sources.code:read_code_tar", endings=("tar", "tgz"), packed=True),
        InputFormat(name="folder", read="ingot.data.sources.code:read_folder"),
    ),
)
