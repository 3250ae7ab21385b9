"""After a purge the documents are gone from every file, other bytes are unchanged, and a kill leaves no third state."""

import errno
import gzip
import os
import shutil
import sys
from itertools import pairwise

import numpy as np
import pytest
from tests.expect import refused
from tests.unit.data.dedup.search import find_duplicates
from tests.unit.data.lineage.purge.conftest import crawl

from ingot.data.build.corpus import load_corpus, read_documents, read_jsonl, verify_corpus
from ingot.data.build.duplicates import index_corpus
from ingot.data.build.prepare import verify
from ingot.data.dedup.bands import write_bands
from ingot.data.dedup.index import Index
from ingot.data.dedup.minhash import DedupRules, shingle_set, signature
from ingot.data.lineage.card import gather_card
from ingot.data.lineage.purge import journal
from ingot.data.lineage.purge import purge as purging
from ingot.data.lineage.purge.history import Purged, PurgedList, is_redacted, read_purges
from ingot.data.lineage.purge.journal import is_unfinished
from ingot.data.lineage.purge.purge import purge
from ingot.data.lineage.purge.request import PurgeRequest
from ingot.data.lineage.records import read_lineage
from ingot.data.lineage.verify import verify_tokens
from ingot.errors import RunBusyError
from ingot.schema.corpus import Document
from ingot.schema.tokens import read_token_manifest
from ingot.storage import exclusive, sha256_file


@pytest.fixture
def data(tmp_path, folders):
    return folders.make_folder(tmp_path / "data", folders.crawl(), folders.tokenizer)


def tree(folder, *patterns):
    files = {p for pattern in patterns for p in folder.glob(pattern) if p.is_file()}
    return {str(p.relative_to(folder)): sha256_file(p) for p in sorted(files)}


DATA = ("corpus/*.gz", "corpus/*.parquet", "tokens/*/*.tokens", "tokens/*/*.documents", "tokens/*/*.blocks",
        "tokens/*/*.parquet")  # fmt: skip


def gone(request_matches, records):
    return frozenset(record["id"] for record in records if request_matches(record))


@pytest.mark.parametrize(
    ("request_", "matches"),
    [
        (
            PurgeRequest(url="HTTPS://A.example:443/p/0#top"),
            lambda r: r["url"].split("?")[0] == "https://a.example/p/0",
        ),
        (PurgeRequest(domain="b.example"), lambda r: ".b.example/" in r["url"] or "/b.example/" in r["url"]),
        (PurgeRequest(pattern=r"number (7|8|9)\."), lambda r: r["record_id"] in "789"),
        (
            PurgeRequest(quarantine=frozenset(record["id"] for record in crawl()[3:9])),
            lambda r: r["record_id"] in list("345678"),
        ),
        (PurgeRequest(pattern="mirror.example"), lambda r: "mirror.example" in r["url"]),
        (PurgeRequest(pattern=r"number 0\.", copies=True), None),
    ],
)
def test_the_rest_is_what_a_build_without_them_gives(data, folders, tmp_path, request_, matches):
    records = folders.crawl()
    outcome = purge(data, request_, reason="asked for by its owner")
    ids = outcome.targets.ids
    if matches:
        assert ids == gone(matches, records)
    else:
        copies = gone(lambda r: r["drop"] and any(one in r["drop"][2] for one in ids), records)
        assert gone(lambda r: r["record_id"] == "0", records) <= ids
        assert copies and copies <= ids
    expected = folders.make_folder(tmp_path / "expected", records, folders.tokenizer, without=ids)
    assert tree(data, *DATA) == tree(expected, *DATA)
    verify_corpus(data / "corpus")
    for split in ("train", "heldout"):
        verify_tokens(data / "tokens" / split)
        manifest = read_token_manifest(data / "tokens" / split)
        wanted = read_token_manifest(expected / "tokens" / split)
        assert manifest.shards == wanted.shards
        assert manifest.corpus_sha256 == sha256_file(data / "corpus/corpus.json")
    assert load_corpus(data / "corpus").parts == load_corpus(expected / "corpus").parts
    assert load_corpus(data / "corpus").dropped == load_corpus(expected / "corpus").dropped


def test_files_without_such_a_document_are_not_touched(data):
    before = {p: p.stat().st_mtime_ns for p in data.rglob("*") if p.is_file()}
    outcome = purge(data, PurgeRequest(url="https://b.example/p/13"))
    place = outcome.locations[0]
    touched = {p.name for p, at in before.items() if not p.exists() or p.stat().st_mtime_ns != at}
    shard = {f"{place.shard}.{end}" for end in ("tokens", "blocks", "documents", "lineage.parquet")}
    names = {"corpus.json", "manifest.json", "web-00001.jsonl.gz", "lineage-00001.parquet"}
    assert touched == names | shard


def test_the_funnel_still_adds_up(data):
    before = load_corpus(data / "corpus").funnel
    outcome = purge(data, PurgeRequest(domain="a.example"))
    after = load_corpus(data / "corpus").funnel
    assert after[0].documents_in == before[0].documents_in
    assert after[-1].name == "purged" and after[-1].dropped == {"purged.later": len(outcome.targets.ids)}
    assert after[-1].documents_out == len(list(read_documents(data / "corpus")))
    for above, below in pairwise(after):
        assert above.documents_out == below.documents_in
    assert all(stage.documents_in - stage.documents_out == sum(stage.dropped.values()) for stage in after)


def test_it_is_on_record_without_its_text_or_url(data):
    old = {split: read_token_manifest(data / "tokens" / split).fingerprint() for split in ("train", "heldout")}
    runs = [{"run": "somewhere", "checkpoints": [100]}]
    purge(data, PurgeRequest(url="https://a.example/p/0"), reason="GDPR 17", find_runs=lambda ids: runs)
    purge(data, PurgeRequest(pattern="number 33"))
    first, second = read_purges(data)
    assert first["reason"] == "GDPR 17" and first["by"] == "url" and first["runs"] == runs and first["kept"] == 1
    assert {split: pair[0] for split, pair in first["fingerprints"].items()} == old
    assert first["fingerprints"]["train"][1] == second["fingerprints"]["train"][0]
    written = (data / "purges.jsonl").read_text() + (data / "purged.txt").read_text()
    assert "a.example" not in written and "number 33" not in written


def test_copies_that_could_come_back_are_named(data, folders):
    records = folders.crawl()
    outcome = purge(data, PurgeRequest(doc=records[0]["id"]))
    assert {copy.id for copy in outcome.targets.copies} == {record["id"] for record in records[-3:]}
    assert read_purges(data)[0]["copies"] == [copy.id for copy in outcome.targets.copies]


def test_no_byte_names_them(data, folders):
    """Not even where a copy that stays says what it is a copy of, nor in what is kept of older layouts."""
    records = folders.crawl()
    purge(data, PurgeRequest(doc=records[0]["id"]))
    purge(data, PurgeRequest(doc=records[1]["id"]))
    for path in sorted(p for p in data.rglob("*") if p.is_file() and p.name not in ("purges.jsonl", "purged.txt")):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        elif path.suffix == ".parquet":
            content = str(list(read_lineage(path))).encode()
        for record in records[:2]:
            assert record["id"].encode() not in content and bytes.fromhex(record["id"]) not in content, path
    copy = next(row for row in read_jsonl(data / "corpus" / "dropped-00001.jsonl.gz") if "mirror" in row["url"])
    assert copy["value"] == "0.912 with " + "0" * 32
    assert gather_card(data).clusters == ()


def test_text_that_stays_in_another_document_is_told(tmp_path, folders):
    records = folders.crawl()
    quoted = records[0]["text"]
    records.append(folders.page(990, "https://quotes.example/1", text=f"They wrote: {quoted} And so on."))
    data = folders.make_folder(tmp_path / "data", records, folders.tokenizer)
    outcome = purge(data, PurgeRequest(doc=records[0]["id"]))
    assert set(outcome.proof.shared) == {records[-1]["id"]}
    assert outcome.proof.probes >= outcome.proof.shared[records[-1]["id"]] >= 6
    assert purge(data, PurgeRequest(doc=records[1]["id"])).proof.shared == {}


def test_text_that_stays_in_another_source_is_told(tmp_path, folders):
    records = folders.crawl()
    quotation = f"They wrote: {records[0]['text']} And so on."
    records += [folders.page(990, "https://quotes.example/1", source="books", file=2, text=quotation)]
    data = folders.make_folder(tmp_path / "data", records, folders.tokenizer)
    assert records[0]["source"] == "web"
    assert set(purge(data, PurgeRequest(doc=records[0]["id"])).proof.shared) == {records[-1]["id"]}


def test_the_list_keeps_them_out(data, folders):
    records = folders.crawl()
    assert len(PurgedList.load(data)) == 0
    purge(data, PurgeRequest(domain="b.example"))
    stage = Purged(PurgedList.load(data))

    def rule(**fields):
        origin = {"id": "0" * 32, "url": "", "source": "", "file": "", "record_id": "", "text": "words"}
        drop = stage(document := Document(**(origin | fields)))
        assert bool(document.text) == (drop is None)  # no excerpt of it comes into the corpus
        return drop and drop.rule

    mine = next(r for r in records if "//b.example" in r["url"] and not r["drop"])
    assert rule(id=mine["id"]) == "purged.document"
    assert rule(url=mine["url"] + "?utm_source=mail#x") == "purged.url"
    assert rule(url="https://new.sub.B.example./never/seen") == "purged.domain"
    assert rule(url="https://else.example/", text=mine["text"] + " before") == "purged.text"
    assert rule(url="https://xb.example/p/3", text="something else") is None


def test_a_broken_list_is_refused(data):
    (data / "purged.txt").write_text("document 12\n")
    with refused("E-PURGE-LIST", line=1):
        PurgedList.load(data)


def test_nothing_that_matches_changes_nothing(data):
    before = tree(data, "**/*")
    outcome = purge(data, PurgeRequest(domain="elsewhere.example"))
    assert outcome.record is None and not outcome.targets.records
    assert tree(data, "**/*") == before


def test_a_dry_run_changes_nothing(data):
    before = tree(data, "**/*")
    outcome = purge(
        data, PurgeRequest(domain="a.example"), dry_run=True, find_runs=lambda ids: [{"run": str(len(ids))}]
    )
    assert outcome.locations and outcome.runs[0]["run"] == str(len(outcome.targets.ids)) != "0"
    assert tree(data, "**/*") == before


@pytest.mark.parametrize(
    ("request_", "code", "facts"),
    [
        (PurgeRequest(), "E-PURGE-REQUEST", {"option": "request"}),
        (PurgeRequest(url="https://a.example/", doc="0" * 32), "E-PURGE-REQUEST", {"option": "request"}),
        (PurgeRequest(doc="12ab"), "E-PURGE-REQUEST", {"option": "doc"}),
        (PurgeRequest(pattern="("), "E-PURGE-REQUEST", {"option": "pattern"}),
        (PurgeRequest(pattern="x*"), "E-PURGE-REQUEST", {"option": "pattern"}),
        (PurgeRequest(domain="   "), "E-DOMAIN-NAME", {"domain": "   "}),
        (PurgeRequest(domain="a.example/p/0"), "E-DOMAIN-PAGE", {"domain": "a.example/p/0"}),
        (PurgeRequest(domain="https://a.example/?p=0"), "E-DOMAIN-PAGE", {}),
    ],
)
def test_bad_requests_are_refused(data, request_, code, facts):
    with refused(code, **facts):
        purge(data, request_)


def test_damage_is_not_made_to_look_right(data):
    place = purge(data, PurgeRequest(url="https://a.example/p/0"), dry_run=True).locations[0]
    path = data / "tokens" / place.split / f"{place.shard}.tokens"
    path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    before = tree(data, "**/*")
    with refused("E-SHARD-HASH", path=str(path), block=0):
        purge(data, PurgeRequest(url="https://a.example/p/0"))
    assert tree(data, "**/*") == before and not (data / ".purge").exists()


def test_a_full_disk_leaves_everything_as_it_was(data, monkeypatch):
    before, written = tree(data, "**/*"), []

    def full(path, content):
        written.append(path)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    monkeypatch.setattr(journal, "write_atomic", full)
    with refused("E-DISK-FULL", path=str(data)):
        purge(data, PurgeRequest(domain="a.example"))
    assert len(written) == 4 and tree(data, "**/*") == before and not (data / ".purge").exists()
    monkeypatch.undo()
    assert purge(data, PurgeRequest(domain="a.example")).record


def test_a_busy_folder_and_an_unfinished_build_are_refused(data):
    with exclusive(data, "building"), pytest.raises(RunBusyError):
        purge(data, PurgeRequest(domain="a.example"))
    (data / ".corpus.work").mkdir()
    with exclusive(data / ".corpus.work", "building"), pytest.raises(RunBusyError):
        purge(data, PurgeRequest(domain="a.example"))
    with refused("E-BUILD-UNFINISHED", folder=str(data / ".corpus.work")):
        purge(data, PurgeRequest(domain="a.example"))


def test_an_id_in_an_index_of_something_else_is_found(data, folders):
    record = folders.crawl()[0]
    (data / "corpus" / "clusters.txt").write_text(f"x {record['id']}\n")
    with refused("E-PURGE-REMAINS", remains=[f"document {record['id']} in {data / 'corpus' / 'clusters.txt'}"]):
        purge(data, PurgeRequest(doc=record["id"]))


def test_the_same_again_scans_again(data, folders, monkeypatch):
    """A scan that was stopped, or that found something, is not forgotten."""
    record, request_ = folders.crawl()[0], PurgeRequest(url="https://a.example/p/0")

    def stopped(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(purging, "prove", stopped)
        purge(data, request_)
    again = purge(data, request_)
    assert again.proof and again.earlier == read_purges(data)[0] and not again.targets.records
    assert purge(data, PurgeRequest(url="https://a.example/p/4")).earlier is None
    (data / "corpus" / "clusters.txt").write_text(f"x {record['id']}\n")
    with refused("E-PURGE-REMAINS"):
        purge(data, request_)


def test_what_a_build_left_out_is_no_remainder(data):
    row = {"id": "1" * 32, "stage": "purged", "url": "", "text": ""}
    assert is_redacted(row)
    assert not any(map(is_redacted, (row | {"url": "https://a.example/"}, row | {"text": "x"}, row | {"stage": "url"})))


def test_an_index_of_kept_documents_forgets_them_too(data, folders, tmp_path):
    records = folders.crawl()
    index_corpus(data / "corpus", data / "index", lambda *_: None)
    outcome = purge(data, PurgeRequest(domain="a.example"))
    expected = folders.make_folder(tmp_path / "expected", records, folders.tokenizer, without=outcome.targets.ids)
    index_corpus(expected / "corpus", expected / "index", lambda *_: None)
    assert tree(data / "index", "**/*") == tree(expected / "index", "**/*")
    untouched = tree(data / "index", "**/*")
    purge(data, PurgeRequest(pattern="mirror.example"))  # was dropped, so it is not in the index
    assert tree(data / "index", "**/*") == untouched


def test_an_index_part_may_become_empty(data, tmp_path):
    rules, books = DedupRules(), [row["text"] for source, row in read_documents(data / "corpus") if source == "books"]
    index_corpus(data / "corpus", data / "index", lambda *_: None)
    others = Index(data / "index", rules).documents - len(books)
    purge(data, PurgeRequest(pattern="|".join(f"{text[-20:-1]}" for text in books)))
    index = Index(data / "index", rules, verify=True)
    assert index.documents == others and len(index.folders) == 3
    new = [row["text"] for _, row in read_documents(data / "corpus")][-1:] + books[:1]
    (tmp_path / "new").mkdir()
    (tmp_path / "work").mkdir()
    sets = [shingle_set(text, rules) for text in new]
    write_bands(np.array([signature(one, rules.permutations) for one in sets], np.uint32), rules, tmp_path / "new")
    found = find_duplicates([tmp_path / "new"], sets.__getitem__, rules, tmp_path / "work", index=index)
    assert found["document"].tolist() == [others]


def test_damage_of_an_index_is_not_made_to_look_right(data):
    index_corpus(data / "corpus", data / "index", lambda *_: None)
    path = data / "index" / "part-00000" / "sets.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = tree(data, "**/*")
    with refused("E-FILE-HASH", path=str(path)):
        purge(data, PurgeRequest(domain="a.example"))
    assert tree(data, "**/*") == before


def test_a_folder_without_lineage_is_refused(data):
    for path in (data / "corpus").glob("lineage-*"):
        path.unlink()
    with refused("E-LINEAGE-MISSING"):
        purge(data, PurgeRequest(domain="a.example"))


def _killed_at(data, request_, event_number):
    """Run the purge in a fork that is killed before its `event_number`-th change of the disk. True if it was."""
    child = os.fork()
    if child == 0:
        try:
            seen = 0

            def hook(event, arguments):
                nonlocal seen
                writes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
                if event == "open" and isinstance(arguments[2], int):
                    writes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
                if writes:
                    seen += 1
                    if seen == event_number:
                        os._exit(9)

            sys.addaudithook(hook)
            purge(data, request_)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_a_kill_at_any_write_leaves_the_old_state_or_one_that_the_same_command_finishes(tmp_path, folders):
    data = folders.make_folder(tmp_path / "data", folders.crawl(pages=12), folders.tokenizer)
    index_corpus(data / "corpus", data / "index", lambda *_: None)
    request_, files = PurgeRequest(domain="a.example"), (*DATA, "index/*/*", "**/*.json", "purged.txt")
    old = tree(data, "**/*")
    final, copy = tmp_path / "final", tmp_path / "copy"
    shutil.copytree(data, final)
    purge(final, request_)
    new = tree(final, *files)
    states, at = [], 1
    while True:
        shutil.copytree(data, copy, copy_function=os.link)
        if not _killed_at(copy, request_, at):
            break
        now = {name: digest for name, digest in tree(copy, "**/*").items() if not name.startswith(".purge")}
        decided = is_unfinished(copy)
        states.append("decided" if decided else "old" if now == old else "new")
        if decided:
            with refused("E-PURGE-UNFINISHED", path=str(copy)):
                purge(copy, request_, dry_run=True)
            for folder in (copy, copy / "corpus", copy / "tokens" / "train"):
                with refused("E-PURGE-UNFINISHED", path=str(copy)):
                    verify(folder)
        elif now != old:
            assert tree(copy, *files) == new
        assert (purge(copy, request_).finished is not None) == decided
        assert tree(copy, *files) == new and len(read_purges(copy)) == 1 and not list(copy.glob(".purge"))
        shutil.rmtree(copy)
        at += 15 if decided else 45
    assert states == sorted(states, key=["old", "decided", "new"].index)
    assert states.count("decided") > 2 < states.count("old")
