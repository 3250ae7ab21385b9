"""The data card shows the content of the folder, and crawled text in it cannot act."""

import json
import re
from collections import Counter
from html.parser import HTMLParser

from tests.expect import refused

from ingot.cli.terminal import Terminal
from ingot.data.lineage.card import gather_card
from ingot.data.lineage.purge.purge import purge
from ingot.data.lineage.purge.request import PurgeRequest
from ingot.report.card import clean, write_card
from ingot.schema.tokens import read_token_manifest

HOSTILE = "</blockquote><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x00&lt;b&gt;\ud800"


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes = set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs


def tags_of(path):
    parser = _Tags()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


def test_the_card_shows_the_content_of_the_folder(data, folders):
    records = folders.crawl()
    kept = [record for record in records if not record["drop"]]
    facts = gather_card(data)
    assert (facts.records, facts.kept) == (len(records), len(kept))
    assert sum(n for _, n in facts.lengths) == sum(n for _, n in facts.domains) == len(kept)
    assert dict(facts.languages) == {"en": len(kept)} and dict(facts.encodings) == {"utf-8": len(kept)}
    assert facts.clusters == ((2, 1),)
    assert facts.domain_count == len({record["url"].split("/")[2] for record in kept})
    for source in facts.sources:
        mine = [record for record in kept if record["source"] == source.name]
        assert (source.documents, source.text_bytes) == (len(mine), sum(len(r["text"]) for r in mine))
        shards = read_token_manifest(data / "tokens/train").shards
        assert source.tokens["train"] == sum(shard.tokens for shard in shards if shard.source == source.name)
    by_id = {record["url"]: record["text"] for record in records}
    assert all(by_id[sample.url].startswith(sample.text) for sample in facts.samples)
    assert {sample.rule for sample in facts.samples} == {r["drop"][1] if r["drop"] else "" for r in records}
    assert gather_card(data) == facts


def test_edits_are_counts_not_scores(tmp_path, folders, monkeypatch):
    original = folders._row
    notes = {"pii_email": 2, "language_score": 0.5, "c4_lines": 0, "encoding": "utf-8", "odd'; key": 1}
    monkeypatch.setattr(folders, "_row", lambda record: original(record) | {"notes": notes})
    facts = gather_card(folders.make_folder(tmp_path / "edited", folders.crawl(), folders.tokenizer))
    assert facts.edits == (("odd'; key", facts.kept, facts.kept), ("pii_email", facts.kept, 2 * facts.kept))


def test_nothing_of_a_crawl_can_act(tmp_path, folders):
    records = folders.crawl()
    for number, drop in enumerate((None, ("gopher", "gopher.word_count", f"1 < 50 {HOSTILE}"))):
        url = f"https://evil.example/{HOSTILE}/{number}"  # with a lone surrogate, as broken URLs have
        record = folders.page(800 + number, "https://evil.example/", text=HOSTILE.replace("\ud800", ""), drop=drop)
        records.append(record | {"url": url})
    data = folders.make_folder(tmp_path / "data", records, folders.tokenizer)
    facts = write_card(data, tmp_path / "card.html", samples=100)
    assert any("alert(1)" in sample.text for sample in facts.samples)
    page = tags_of(tmp_path / "card.html")
    assert not page.tags & {"script", "img", "iframe", "link", "object", "embed", "base", "form"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not [value for name, value in page.attributes if name in ("href", "src") and not value.startswith("#")]
    text = (tmp_path / "card.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "\u202e" not in text and "\x00" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_purges_are_listed(data, tmp_path):
    purge(data, PurgeRequest(domain="a.example"), reason="<b>asked</b>")
    write_card(data, tmp_path / "card.html")
    text = (tmp_path / "card.html").read_text()
    assert "&lt;b&gt;asked&lt;/b&gt;" in text and "<b>asked" not in text
    assert "a.example" not in text.replace("data.example", "")


def test_a_card_is_not_written_where_a_purge_would_not_reach_it(data):
    with refused("E-CARD-IN-DATA"):
        write_card(data, data / "card.html")


def test_a_folder_without_lineage_has_no_card(data, tmp_path):
    for path in (data / "corpus").glob("lineage-*"):
        path.unlink()
    with refused("E-LINEAGE-MISSING", folder=str(data)):
        write_card(data, tmp_path / "card.html")


def test_the_verb(data, tmp_path, capsys):
    import argparse

    from ingot.cli.data.folder import configure_card, run_card

    parser = argparse.ArgumentParser()
    configure_card(parser)
    out = tmp_path / "out" / "card.html"
    run_card(parser.parse_args([str(data), "--out", str(out)]), Terminal(json_mode=True))
    facts = json.loads(capsys.readouterr().out)
    assert out.exists() and facts["kept"] and facts["fingerprints"]["train"]
    corpus = tmp_path / "corpus only"
    (data / "corpus").rename(corpus)
    run_card(parser.parse_args([str(corpus), "--out", str(out)]), Terminal(json_mode=True))
    assert json.loads(capsys.readouterr().out)["fingerprints"] == {}


def test_clean_keeps_lines_and_cuts():
    assert clean("a\n\tb\r\x1b[31mc\u202ed", 100) == "a\n\tb\ufffd\ufffd[31mc\ufffdd"
    assert clean("abcdef", 3) == "abc …"


def test_ten_samples_of_a_rule_are_folded_under_its_name(data, tmp_path):
    facts = write_card(data, tmp_path / "card.html")
    html = (tmp_path / "card.html").read_text()
    by_rule = Counter(sample.rule or sample.source for sample in facts.samples)
    assert by_rule["gopher.word_count"] == by_rule["web"] == 10
    opened, inner = html, "<details>((?!<details>).)*?</details>"
    while (shut := re.sub(inner, "", opened, flags=re.DOTALL)) != opened:  # folds are nested
        opened = shut
    assert html.count("<blockquote>") == len(facts.samples) and "<blockquote>" not in opened
    for name, count in by_rule.items():
        assert f"<summary>{name}: {count} sample" in html
    assert html.index('<nav aria-label="Sections">') < html.index("<main>")
