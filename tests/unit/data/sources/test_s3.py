import os
from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.data.sources import s3
from ingot.data.sources.fetch import fetch, version
from ingot.data.sources.input import Input, expand, identity, read

obstore = pytest.importorskip("obstore")
DATA = os.urandom(300_000)


@pytest.fixture
def rules(site, monkeypatch):
    """Rules for a bucket "b" on the test's server, read in small ranges."""
    monkeypatch.setattr(s3, "_RANGE_BYTES", 100_000)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    site.files |= {"/b/f.warc.gz": DATA, "/b/dir/one.jsonl": b'{"text": "one"}\n', "/b/dir/deep/two.jsonl": b"x"}
    return replace(site.rules, s3_endpoint=site.url, s3_anonymous=True)


def test_ranges_of_one_version(site, rules, tmp_path):
    assert fetch("s3://b/f.warc.gz", tmp_path, rules).read_bytes() == DATA
    assert [r for r in site.seen("range") if r] == ["bytes=0-99999", "bytes=100000-199999", "bytes=200000-299999"]
    assert all(site.seen("if-match"))
    assert version("s3://b/f.warc.gz", tmp_path, rules).bytes == len(DATA)


@pytest.mark.parametrize("faults", [[500, 503], ["cut"], ["", "cut", 500, "", "cut"], [429], ["off-by-one"]])
def test_faults_cost_time_only(site, rules, tmp_path, faults):
    site.faults["/b/f.warc.gz"] = list(faults)
    assert fetch("s3://b/f.warc.gz", tmp_path, rules).read_bytes() == DATA
    assert not site.faults["/b/f.warc.gz"]


def test_resumed_from_what_is_there(site, rules, tmp_path):
    site.faults["/b/f.warc.gz"] = [""] + [500] * 99
    with refused("E-REMOTE-UNREACHABLE"):
        fetch("s3://b/f.warc.gz", tmp_path, rules)
    site.faults["/b/f.warc.gz"], site.requests[:] = [], []
    assert fetch("s3://b/f.warc.gz", tmp_path, rules).read_bytes() == DATA
    assert [r for r in site.seen("range") if r] == ["bytes=100000-199999", "bytes=200000-299999"]


def test_object_that_changes_while_it_is_read(site, rules, tmp_path):
    site.faults["/b/f.warc.gz"] = ["", 412]
    assert fetch("s3://b/f.warc.gz", tmp_path, rules).read_bytes() == DATA


def test_what_is_not_there_and_what_is_forbidden(site, rules, tmp_path):
    with refused("E-REMOTE-MISSING"):
        fetch("s3://b/none", tmp_path, rules)
    site.faults["/b/f.warc.gz"] = [403] * 9
    with refused("E-REMOTE-FORBIDDEN"):
        fetch("s3://b/f.warc.gz", tmp_path, rules)


def test_errors_name_the_object_without_its_query():
    for error in (OSError("no route"), obstore.exceptions.PreconditionError("412")):
        with pytest.raises(s3.Unreachable) as caught, s3._translated_errors("s3://b/k?sig=SECRET"):
            raise error
        assert str(caught.value).startswith("s3://b/k") and "SECRET" not in str(caught.value)


def test_a_bucket_may_have_a_tenant_but_no_credentials():
    assert s3.split("s3://tenant:b/k") == ("tenant:b", "k") and s3.split("s3://b/k@2") == ("b", "k@2")
    for word in ("s3://key@b/k", "s3://key:word@b/k", "s3://key:wo/rd@b/k"):
        with refused("E-S3-NAME"):
            s3.split(word)


def test_prefixes_and_patterns(site, rules, tmp_path):
    def named(word):
        return [(one.location, one.name) for one in expand([word], "web", cache=tmp_path, rules=rules)]

    assert named("s3://b/dir/") == [
        ("s3://b/dir/deep/two.jsonl", "deep__two.jsonl"),
        ("s3://b/dir/one.jsonl", "one.jsonl"),
    ]
    assert named("s3://b/dir/*.jsonl") == [("s3://b/dir/one.jsonl", "one.jsonl")]
    assert named("s3://b/f.warc.gz") == [("s3://b/f.warc.gz", "f.warc.gz")]
    with refused("E-INPUT-NOTHING", word="s3://b/other/"):
        named("s3://b/other/")
    site.faults["/b"] = [500, 503]
    assert len(named("s3://b/dir/")) == 2
    for word in ("s3://", "s3://b/../x", "s3://b//x"):
        with refused("E-S3-NAME", location=word):
            list(read(Input(location=word), tmp_path, rules=rules))


def test_list_that_is_older_than_the_bucket(site, rules, tmp_path):
    """An object that the list still has, and one whose size has changed since."""
    site.faults["/b"] = [["/b/dir/zombie.jsonl"]]
    *_, zombie = expand(["s3://b/dir/"], "web", cache=tmp_path, rules=rules)
    assert zombie.location == "s3://b/dir/zombie.jsonl"
    with refused("E-REMOTE-MISSING"):
        list(read(zombie, tmp_path, rules=rules))


def test_documents_out_of_a_bucket(site, rules, tmp_path):
    one = Input(location="s3://b/dir/one.jsonl")
    known = identity(one, tmp_path, rules)
    assert known["name"] == "one.jsonl" and known["bytes"] == 16 and known["etag"]
    ((document, drop),) = read(one, tmp_path, rules=rules, known=known)
    assert drop is None and document.raw == b"one"


def test_version_in_a_store_of_this_machine(tmp_path):
    """obstore's own store, so that nothing depends on how the server above imitates S3."""
    from obstore.store import LocalStore

    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "key").write_bytes(DATA)
    store = LocalStore(tmp_path / "store")
    one = s3.S3Object("s3://any/key", s3.RemoteRules(), store)
    part = one.part(299_000, one.version())
    assert part.start == 299_000 and b"".join(part.pieces) == DATA[299_000:]
    assert s3.listed("s3://any/", s3.RemoteRules(), store) == ["s3://any/key"]
