"""A purged page stays out of the next build of the folder, whether the last build kept it or not."""

import gzip
import shutil
from itertools import pairwise

from ingot.data.build.corpus import load_corpus, read_documents
from ingot.data.build.prepare import prepare, verify
from ingot.data.lineage.purge.purge import purge
from ingot.data.lineage.purge.request import PurgeRequest
from ingot.data.lineage.records import read_lineage
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
    assert len(purge(data, PurgeRequest(url="http://a.example/2")).targets.ids) == 2  # and a later spelling of it
    shutil.rmtree(data / "corpus")
    shutil.rmtree(data / "tokens")
    build(data, crawl)
    verify(data)
    manifest = load_corpus(data / "corpus")
    row = next(stage for stage in manifest.funnel if stage.name == "purged")
    assert row.dropped["purged.document"] and manifest.funnel[0].documents_in == 13
    assert all(above.documents_out == below.documents_in for above, below in pairwise(manifest.funnel))
    assert not any(text[:30].encode() in content for content in everything(data))


def test_a_purged_site_does_not_come_back(crawl, tmp_path):
    """The site has pages that were kept, not found, empty, dropped by rules and by URL; a copy is on another site."""
    data = tmp_path / "data"
    build(data, crawl)
    before = {row["url"]: row["text"] for _, row in read_documents(data / "corpus")}
    outcome = purge(data, PurgeRequest(domain="a.example"))
    assert outcome.targets.copies
    shutil.rmtree(data / "corpus")
    shutil.rmtree(data / "tokens")
    build(data, crawl)
    verify(data)
    manifest = load_corpus(data / "corpus")
    row = next(stage for stage in manifest.funnel if stage.name == "purged")
    assert sum(row.dropped.values()) == len(outcome.targets.ids) == 8
    assert manifest.funnel[0].documents_in == 13
    assert all(above.documents_out == below.documents_in for above, below in pairwise(manifest.funnel))
    beginnings = [text[:30].encode() for url, text in before.items() if "a.example" in url]
    for content in everything(data / "corpus"):
        assert b"a.example" not in content.lower()
        if b"b.example/mirror" not in content:
            assert not any(one in content for one in beginnings)
    again = purge(data, PurgeRequest(domain="a.example"))
    assert again.proof and not again.targets.records
