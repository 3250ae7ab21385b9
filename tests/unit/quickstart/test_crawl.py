import hashlib
import json
import subprocess
from collections import Counter

import pytest
from tests.expect import refused

from ingot.data.extract.html import Extract
from ingot.data.filters.language import Language
from ingot.data.filters.toxicity import Toxicity
from ingot.data.sources.url import UrlDuplicates, canonical_url
from ingot.data.sources.warc import read_warc
from ingot.quickstart import crawl as crawling
from ingot.quickstart import pydoc_pages
from ingot.quickstart.crawl import make_crawl, source_of
from ingot.quickstart.guide import source_files


@pytest.fixture
def small(monkeypatch):
    """A hundred modules, and pydoc pages that need no process."""
    files = [f for f in source_files() if f[0].split(".")[0] in ("json", "email", "http", "logging", "asyncio")]
    monkeypatch.setattr(crawling, "source_files", lambda: files)

    def start(out):
        pages = [{"path": f"/library/{n}.html", "html": pydoc_pages.module_page(n)} for n in ("json", "bisect")]
        out.write_text("".join(json.dumps(page) + "\n" for page in pages) + '{"path": "/library/half')
        return subprocess.Popen(["true"])

    monkeypatch.setattr(crawling, "_start_pydoc", start)


def test_crawl_is_a_real_one_and_repeats_to_the_byte(small, tmp_path):
    reported = []
    paths = make_crawl(tmp_path / "a", files=2, progress=lambda fraction, text: reported.append(fraction))
    assert [p.name for p in paths] == [
        "crawl-guide-0000.warc.gz",
        "crawl-guide-0001.warc.gz",
        "crawl-pydoc-0000.warc.gz",
    ]
    assert [source_of(p) for p in paths] == ["guide", "guide", "pydoc"]
    assert reported == sorted(reported) and reported[-1] == 1.0
    again = make_crawl(tmp_path / "b", files=2)
    digest = [hashlib.sha256(p.read_bytes()).hexdigest() for p in paths]
    assert digest == [hashlib.sha256(p.read_bytes()).hexdigest() for p in again]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [p.name for p in paths]  # nothing left over


def test_every_stage_meets_something_to_drop(small, tmp_path):
    fates, seen = Counter(), UrlDuplicates()
    stages = (Extract(), Language(), Toxicity())
    for path in make_crawl(tmp_path):
        for document, drop in read_warc(path, source_of(path)):
            if drop is None and seen.seen(canonical_url(document.url)):
                fates["url"] += 1
                continue
            for stage in stages:
                drop = drop or stage(document)
            fates[drop.rule if drop else f"kept {document.source}"] += 1
    assert fates["kept guide"] > 50 and fates["kept pydoc"] >= 1
    assert {"read.http_status", "url", "extract.empty", "language.other", "toxicity.words"} <= set(fates)
    assert fates["toxicity.words"] == 2 and fates["language.other"] == 3


def test_disk_is_checked_first(small, tmp_path, monkeypatch):
    monkeypatch.setattr(crawling, "_NEEDED_BYTES", 1 << 60)
    with refused("E-DISK-SPACE"):
        make_crawl(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_renderer_that_hangs_or_fails_is_said(small, tmp_path, monkeypatch):
    monkeypatch.setattr(crawling, "_PYDOC_DEADLINE_SECONDS", 0.05)
    monkeypatch.setattr(crawling, "_start_pydoc", lambda out: subprocess.Popen(["sleep", "60"]))
    reported = []
    paths = make_crawl(tmp_path, files=1, progress=lambda fraction, text: reported.append(text))
    assert len(paths) == 2 and "pydoc did not finish" in reported[-1]
    monkeypatch.setattr(crawling, "_start_pydoc", lambda out: subprocess.Popen(["false"]))
    make_crawl(tmp_path, files=1, progress=lambda fraction, text: reported.append(text))
    assert "pydoc ended with code 1" in reported[-1]


def test_pydoc_pages_show_nothing_of_this_machine(tmp_path):
    names = pydoc_pages.module_names()
    assert "json.decoder" in names and not {"os", "sys", "antigravity", "test", "turtle"} & set(names)
    page = pydoc_pages.module_page("argparse")
    assert page and "ArgumentParser" in page and pydoc_pages.sysconfig.get_path("stdlib") not in page
    assert " at 0x7" not in page and pydoc_pages.module_page("no_such_module") is None
    assert len(pydoc_pages.topic_pages()) > 50


def test_pydoc_runs_without_our_environment(tmp_path, monkeypatch):
    """pydoc prints the environment as the default of some functions, so none may be there."""
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    called = {}
    monkeypatch.setattr(crawling.subprocess, "Popen", lambda command, **options: called.update(options))
    crawling._start_pydoc(tmp_path / "out")
    assert called["env"] == {"PYTHONHASHSEED": "0"}
