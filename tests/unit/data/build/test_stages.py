"""Every stage drops its planted page through the real build; corpora with other stage names can still be read."""

import json
import random
import re
from dataclasses import replace

import pytest
from tests.unit.data.conftest import english, write_crawl

from ingot.cli.main import main
from ingot.data.build.corpus import load_corpus, read_dropped, write_manifest
from ingot.data.build.recipe import load_recipe
from ingot.data.build.stages import STAGES, StageSettings, document_stages, funnel_table, what_ran
from ingot.data.classify.model import write_model
from ingot.data.classify.train import ClassifierSettings, Labelled, train
from ingot.data.lineage.purge.history import redacted_hash
from ingot.data.lineage.records import lineage_connection
from ingot.data.sources.url import canonical_url

SPAM = ["buy", "cheap", "pills", "now", "click", "here", "discount", "offer", "order", "today", "bargain", "coupon"]
KEPT = english(1)
OTHER = english(2)
HALVES = "\n".join(KEPT.split("\n")[:4] + OTHER.split("\n")[:4])


def lines_without_ends(text: str) -> str:
    return "\n".join(line.replace(" and that", ". And that").rstrip(".") for line in text.split("\n"))


def with_spam(seed: int) -> str:
    pick = random.Random(seed)
    words = re.split(r"(\s)", english(seed))
    return "".join(pick.choice(SPAM) if n % 8 == 4 and word.islower() else word for n, word in enumerate(words))


# stage -> (page, status, rule); the order is that of the crawl
PLANTED = {
    "read": ("not found", 404, "read.http_status"),
    "blocklist": (english(10), 200, "blocklist.domain"),
    "extract": ("<html><body></body></html>", 200, "extract.empty"),
    "purged": (english(11), 200, "purged.url"),
    "url": (english(12), 200, "url.duplicate"),
    "language": ("Der Hund und die Katze gehen heute nicht in den Wald, weil es regnet. " * 9, 200, "language.other"),
    "gopher": ("The end of it and that is all to be read.", 200, "gopher.word_count"),
    "c4": (english(13) + "\nfunction run() { return to the start of it; }", 200, "c4.curly_bracket"),
    "fineweb": (lines_without_ends(english(14)), 200, "fineweb.terminal_punctuation"),
    "junk": (english(15).replace("e ", "â€™ "), 200, "junk.mojibake"),
    "classifier": (with_spam(16), 200, "classifier.spam"),
    "toxicity": (english(17, extra=" idiot, damn moron"), 200, "toxicity.words"),
    "pii": (english(18, extra=" jane@corp-site.org"), 200, "pii.density"),
    "contaminated": (english(19), 200, "contaminated.ngram"),
    "duplicates": (KEPT, 200, "duplicates.same_text"),
    "near_duplicates": (KEPT + "\nThe copy of this page is on another host, as one reads.", 200,
                        "near_duplicates.similar"),
    "substrings": (HALVES, 200, "substrings.too_short"),
}  # fmt: skip


def url_of(stage: str) -> str:
    return "http://kept.example/1?utm_source=x" if stage == "url" else f"http://{stage.replace('_', '-')}.example/page"


@pytest.fixture
def built(tmp_path, capsys):
    """A folder of `ingot data build` whose crawl has three pages to keep and one page per stage to drop."""
    pytest.importorskip("fasttext")
    examples = [Labelled(english(100 + n), ("good",)) for n in range(60)]
    examples += [Labelled(with_spam(200 + n), ("spam",)) for n in range(60)]
    settings = ClassifierSettings(dim=8, buckets=1 << 12, min_count=2, epochs=5, batch=8, rate=0.5)
    write_model(tmp_path / "spam.bin", train(examples, settings))
    (tmp_path / "blocked.txt").write_text("blocklist.example\n")
    (tmp_path / "questions.txt").write_text(PLANTED["contaminated"][0].split("\n")[0])
    data = tmp_path / "data"
    data.mkdir()
    (data / "purged.txt").write_text(f"url {redacted_hash(canonical_url(url_of('purged')))}\n")
    pages = [(f"http://kept.example/{n}", text, 200) for n, text in enumerate((OTHER, KEPT, english(3)))]
    pages += [(url_of(stage), text, status) for stage, (text, status, _) in PLANTED.items()]
    crawl = write_crawl(tmp_path / "crawl.warc.gz", pages)
    model = f'{{name="spam", model="{tmp_path / "spam.bin"}", label="spam", keep="below"}}'
    changes = [
        f'blocklist.files=["{tmp_path / "blocked.txt"}"]',
        "classifier.enabled=true",
        f"classifier.models=[{model}]",
        "pii.density=0.02",
        f'decontamination.files=["{tmp_path / "questions.txt"}"]',
        "substrings.enabled=true",
        "substrings.words=12",
    ]
    options = [word for change in changes for word in ("--set", change)]
    assert main(["data", "build", str(crawl), "--out", str(data), "--vocab-size", "300", *options]) == 0
    capsys.readouterr()
    return data


def test_every_stage_drops_its_page(built, capsys):
    assert list(PLANTED) == [stage.name for stage in STAGES], "a new stage needs a planted page"
    corpus = built / "corpus"
    rules = {stage: rule for stage, (_, _, rule) in PLANTED.items()}
    dropped = {row["url"]: row["rule"] for row in read_dropped(corpus) if row["stage"] != "purged"}  # it has no URL
    assert dropped == {url_of(stage): rule for stage, rule in rules.items() if stage != "purged"}
    manifest = load_corpus(corpus)
    assert [(stage.name, stage.dropped) for stage in manifest.funnel] == [(s, {rule: 1}) for s, rule in rules.items()]
    assert manifest.funnel[-1].documents_out == 3
    with lineage_connection([corpus / part.name for part in manifest.lineage]) as lineage:
        rows = lineage.execute("select stage, rule from lineage where rule != ''").fetchall()
    assert dict(rows) == rules
    for rule in rules.values():
        assert main(["data", "inspect", str(built), "--dropped-by", rule, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["total"] == 1
    assert main(["data", "verify", str(built)]) == 0


def test_a_corpus_with_other_stage_names_can_be_read(built, capsys):
    """The names on disk decide, not the list of this version."""
    manifest = load_corpus(built / "corpus")
    renamed = [replace(s, name="decontaminate" if s.name == "contaminated" else s.name) for s in manifest.funnel]
    write_manifest(built / "corpus", replace(manifest, funnel=(*renamed[:5], *renamed[7:])))
    assert main(["data", "inspect", str(built)]) == 0
    assert "decontaminate" in capsys.readouterr().out
    _, rows = funnel_table(load_corpus(built / "corpus").funnel)
    assert [row[0] for row in rows] == [stage.name for stage in (*renamed[:5], *renamed[7:])]


def test_stages_that_are_switched_off_do_not_run():
    every = [f"{name}.enabled=false" for name in ("blocklist", "language", "junk", "toxicity", "pii")]
    settings = StageSettings(load_recipe(None, every, "none"))
    stages = document_stages(settings)
    assert [stage.name for stage in (*stages.before_purged, *stages.before_url, *stages.after_url)] == ["extract"]
    ran = what_ran(settings)
    assert [name for name, text in ran.items() if text != "switched off"] == [
        "read",
        "extract",
        "url",
        "duplicates",
        "near_duplicates",
    ]
