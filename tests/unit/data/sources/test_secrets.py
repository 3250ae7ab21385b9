"""Credentials in URLs stay out of everything that a build prints and writes."""

import json

import pytest
from tests.expect import refused

from ingot.cli.main import main
from ingot.data.sources.fetch import host_connection, retry
from ingot.data.sources.input import Input, read
from ingot.data.sources.remote import RemoteRules, Unreachable, without_secrets

QUERY = "?X-Amz-Signature=SECRET1&token=SECRET2&sig=SECRET3&id=SECRET4#SECRET5"
LINES = "\n".join(json.dumps({"url": f"https://a.example/{i}?id=7", "text": f"stone {i} " * 40}) for i in range(9))


def build(site, out, url, *more) -> int:
    rules = {
        "remote.allow_hosts": f'["{site.host}"]',
        "remote.attempts": "1",
        "remote.s3_endpoint": '"https://me:SECRET6@store.example/?key=SECRET7"',
        "remote.common_crawl": '"https://me:SECRET8@crawl.example"',
        "language.enabled": "false",
    }
    settings = [word for name, value in rules.items() for word in ("--set", f"{name}={value}")]
    where = ("--out", str(out), "--preset", "none", "--vocab-size", "300", "--runner", "inline")
    return main(["data", "build", url, *where, *settings, *more, "--json"])


def written(folder) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_build_from_a_signed_url_writes_no_secret(site, tmp_path, capsys):
    site.files["/pages.jsonl"] = LINES.encode()
    assert build(site, tmp_path / "data", f"{site.url}/pages.jsonl{QUERY}") == 0
    printed = capsys.readouterr()
    assert "SECRET" not in printed.out + printed.err and b"SECRET" not in written(tmp_path)
    assert json.loads((tmp_path / "data/corpus/corpus.json").read_text())["recipe"]["remote"]["s3_endpoint"]


@pytest.mark.parametrize(
    ("url", "fault", "code"),
    [
        ("{site}/pages.jsonl", 403, "E-REMOTE-FORBIDDEN"),
        ("{site}/pages.jsonl", 500, "E-REMOTE-UNREACHABLE"),
        ("{site}/none.jsonl", 0, "E-REMOTE-MISSING"),
        ("{site}/page.jsonl", 400, "E-REMOTE-STATUS"),
        ("http://me:SECRET0@{host}/pages.jsonl", 0, "E-URL-INVALID"),
        ("http://10.0.0.1/pages.jsonl", 0, "E-URL-PRIVATE"),
        ("ftp://me:SECRET0@{host}/pages.jsonl", 0, "E-INPUT-SCHEME"),
        ("s3://bucket/a//b", 0, "E-S3-NAME"),
        ("s3://AKIA:SECRET0/+SECRET9@bucket/pages.jsonl", 0, "E-S3-NAME"),
        ("https://AKIA:SECRET0/+SECRET9@{host}/pages.jsonl", 0, "E-URL-INVALID"),
        ("https://me:SECRET0?SECRET9@{host}/pages.jsonl", 0, "E-URL-INVALID"),
        ("https://me:SECRET0[@{host}/pages.jsonl", 0, "E-URL-INVALID"),
        ("https://me:[SECRET0]@{host}/pages.jsonl", 0, "E-URL-INVALID"),
        ("https://+SECRET0/SECRET9@{host}/pages.jsonl", 0, "E-URL-INVALID"),
        ("https://{host}/pages.jsonl?a b&SECRET0=", 0, "E-URL-INVALID"),
    ],
)
def test_a_refused_url_is_named_without_secrets(site, tmp_path, capsys, url, fault, code):
    site.knows_head = False
    site.files["/pages.jsonl"] = site.files["/page.jsonl"] = LINES.encode()
    for path in site.files:
        site.faults[path] = [fault] * 3 if fault else []
    assert build(site, tmp_path / "data", url.format(site=site.url, host=site.host) + QUERY) in (3, 20)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"] == code
    assert "secret" not in (printed.out + printed.err).lower() and b"SECRET" not in written(tmp_path)
    assert not list(tmp_path.rglob("*secret*"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:p@h.example:8/a/b?x=1#y", "https://h.example:8/a/b"),
        ("https://u@p@h.example/", "https://h.example/"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("GET https://h/x?sig=1 failed, then s3://k:s@h/y?z failed", "GET https://h/x failed, then s3://h/y failed"),
        ("https://AKIA:wJal/K7M+x@minio.example/b.warc.gz", "https://.../minio.example/b.warc.gz"),
        ("s3://AKIA:12/RET@bucket/key", "s3://.../bucket/key"),
        ("https://u:p?w@h.example/x", "https://..."),
        ("https://u:p#w@h.example/x", "https://..."),
        ("https://u:p/w?o@h.example/x", "https://..."),
        ("https://u:p@h.example/x?sig=a@SECRET", "https://..."),
        ("https://h.example/x?sig=a b&token=SECRET", "https://h.example/x"),
        ("https://u:p w@h.example/x", "https://h.example/x"),
        ("cannot read https://u:p/w@h.example/x?y=1 (404)", "cannot read https://.../h.example/x (404)"),
        ("data/part?-1.jsonl", "data/part?-1.jsonl"),
        ("cc:CC-MAIN-2024-10#0-9", "cc:CC-MAIN-2024-10#0-9"),
    ],
)
def test_urls_lose_user_and_query(text, shown):
    assert without_secrets(text) == shown == without_secrets(shown)


def test_a_download_that_is_given_up_is_reported_without_secrets():
    location = "https://me:SECRET@h.example/x?sig=a SECRET&b=SECRET"

    def fail():
        raise Unreachable(f"{location} is down, as is http://me:SECRET@mirror.example/?SECRET")

    with refused("E-REMOTE-UNREACHABLE", location="https://h.example/x") as caught:
        retry(fail, location, RemoteRules(attempts=1))
    assert "SECRET" not in str(caught.value) and "mirror.example" in caught.value.found


def test_the_lock_of_a_connection_is_named_without_user(tmp_path):
    with host_connection("me:secret@crawl.example:8", tmp_path, RemoteRules()):
        assert [path.name for path in (tmp_path / ".hosts").iterdir()] == ["crawl.example_8.0"]


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("https://tok@h.example/?f=x", "h.example"),
        ("https://AKIA:sec/ret@h.example", "h.example"),
        ("https://u:p?w@h.example/x", "..."),
        ("https://h.example:8/a@b.jsonl", "a_b.jsonl"),
        ("s3://bucket/a@b.jsonl", "a_b.jsonl"),
        ("https://[::1]:8/x.jsonl", "x.jsonl"),
        ("https://h.example/x.jsonl?mail=a@b", "b232a25f-x.jsonl"),
    ],
)
def test_inputs_are_named_without_user(location, name):
    assert Input(location=location).name == name


def test_a_copy_that_cannot_be_read_is_reported_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.data.sources.fetch.fetch", lambda *_, **__: tmp_path / "none.jsonl")
    with refused("E-INPUT-READ-FAILED", path="https://h.example/x.jsonl"):
        list(read(Input(location="https://me:SECRET@h.example/x.jsonl?SECRET"), tmp_path))
