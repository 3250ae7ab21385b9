"""What was purged stays out of the next build of the folder, whatever became of it in the one before."""

import gzip
import shutil
from itertools import pairwise

from ingot.data.corpus import load_corpus, read_documents
from ingot.data.lineage import read_lineage
from ingot.data.prepare import prepare, verify
from ingot.data.purge.purge import purge
from ingot.data.purge.request import Request
from ingot.data.sources.input import Input


def build(data, crawl):
    return prepare([Input(location=str(path)) for path in crawl], data, vocab_size=300)


def everything(folder):
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        elif path.suffix == ".parquet":
            content = str(list(read_lineage(path))).encode()
        yield content


def test_no_excerpt_of_a_purged_page_comes_back(crawl, tmp_path):
    data = tmp_path / "data"
    build(data, crawl)
    (text,) = (row["text"] for _, row in read_documents(data / "corpus") if row["url"] == "http://a.example/2")
    assert len(purge(data, Request(url="http://a.example/2")).targets.ids) == 2  # and a later spelling of it
    shutil.rmtree(data / "corpus")
    shutil.rmtree(data / "tokens")
    build(data, crawl)
    verify(data)
    manifest = load_corpus(data / "corpus")
    row = next(stage for stage in manifest.funnel if stage.name == "purged")
    assert row.dropped["purged.document"] and manifest.funnel[0].documents_in == 13
    assert all(above.documents_out == below.documents_in for above, below in pairwise(manifest.funnel))
    assert not any(text[:30].encode() in content for content in everything(data))
