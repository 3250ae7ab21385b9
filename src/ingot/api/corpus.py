"""A corpus folder as an object: `ingot.Corpus`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ingot.api.run import html_table
from ingot.data.build.corpus import MANIFEST, load_corpus, read_dropped, read_part
from ingot.data.build.shards import SPLITS
from ingot.data.build.stages import funnel_table
from ingot.schema.corpus import CorpusManifest, FunnelStage
from ingot.schema.tokens import MANIFEST as TOKEN_MANIFEST
from ingot.schema.tokens import TokenManifest, read_token_manifest


class Corpus:
    """A finished corpus: kept documents by source, dropped documents with their reasons, and the funnel.

    path: the corpus folder; the folder OUT of `ingot data build --out OUT` may be given as well. manifest: the content
    of its corpus.json. Raises DataMissing if there is no corpus, DataError if it is unfinished or damaged.

        corpus = ingot.Corpus("data")
        len(corpus), corpus.sources, [document["text"] for document in corpus]
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        self.path = path / "corpus" if (path / "corpus" / MANIFEST).is_file() else path
        self.manifest: CorpusManifest = load_corpus(self.path)

    @property
    def sources(self) -> dict[str, int]:
        """The number of kept documents of each source."""
        counts: Counter[str] = Counter()
        for part in self.manifest.parts:
            counts[part.source] += part.documents
        return dict(counts)

    @property
    def text_bytes(self) -> int:
        """The number of UTF-8 bytes of all kept texts."""
        return sum(part.text_bytes for part in self.manifest.parts)

    @property
    def funnel(self) -> tuple[FunnelStage, ...]:
        """The stages in order, each with the documents that came in and went out, and the number dropped by rule."""
        return self.manifest.funnel

    @property
    def tokens(self) -> dict[str, TokenManifest]:
        """The manifests of the token folders next to the corpus: "train" and "heldout"; {} if there are none."""
        folders = {split: self.path.parent / "tokens" / split for split in SPLITS}
        return {split: read_token_manifest(f) for split, f in folders.items() if (f / TOKEN_MANIFEST).is_file()}

    def documents(self, source: str | None = None) -> Iterator[dict]:
        """Yield the kept documents in order: dicts with id, url, source, file, record_id, language, text, all str.

        source: only documents of this source. Every file is compared with its hash before it is read; raises DataError
        if it differs.
        """
        for part in self.manifest.parts:
            if source in (None, part.source):
                yield from read_part(self.path / part.name, part.sha256)

    def dropped(self) -> Iterator[dict]:
        """Yield the dropped documents in order: dicts with id, url, source, file, stage, rule, value, and an excerpt
        as text.
        """
        return read_dropped(self.path)

    def __iter__(self) -> Iterator[dict]:
        return self.documents()

    def __len__(self) -> int:
        return sum(part.documents for part in self.manifest.parts)

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r})"

    def _repr_html_(self) -> str:
        header, rows = funnel_table(self.funnel)
        return html_table([list(row[:4]) for row in (header, *rows)])
