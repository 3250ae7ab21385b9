import gzip
import hashlib
import io
import tarfile
from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.data.sources.input import Input, expand, forget, identity, read
from ingot.data.sources.text import Fields
from ingot.errors import ConfigError

PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>A page</p>"
WARC = (
    b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:1>\r\nWARC-Target-URI: http://a.example/\r\n"
    b"Content-Type: application/http\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n" % (len(PAGE), PAGE)
)


def tar():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("a.py")
        info.size = 6
        archive.addfile(info, io.BytesIO(b"x = 1\n"))
    return out.getvalue()


def parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"text": ["row"]}), tmp_path / "made")
    return (tmp_path / "made").read_bytes()


@pytest.fixture
def contents(tmp_path):
    return {
        "c.warc.gz": gzip.compress(WARC),
        "d.warc": WARC,
        "j.jsonl": b'{"text": "row"}\n',
        "k.json.gz": gzip.compress(b'{"text": "row"}\n'),
        "p.parquet": parquet(tmp_path),
        "r.tar": tar(),
        "s.tgz": gzip.compress(tar()),
        "t.txt": b"words",
    }


def raws(one, cache, **more):
    return [document.raw if drop is None else drop.rule for document, drop in read(one, cache, **more)]


def test_formats_are_told_by_name_and_by_content(tmp_path, contents):
    texts = {"r.tar": b"x = 1\n", "s.tgz": b"x = 1\n", "t.txt": b"words"}
    texts |= {"c.warc.gz": b"<p>A page</p>", "d.warc": b"<p>A page</p>"}
    expected = {name: [texts.get(name, b"row")] for name in contents}
    for number, (name, data) in enumerate(contents.items()):
        (tmp_path / name).write_bytes(data)
        assert raws(Input(location=str(tmp_path / name)), tmp_path) == expected[name], name
        if name != "t.txt":  # any bytes could be text, so the format is required
            (tmp_path / f"download{number}").write_bytes(data)
            assert raws(Input(location=str(tmp_path / f"download{number}")), tmp_path) == expected[name], name
    with refused("E-INPUT-FORMAT"):
        (tmp_path / "plain").write_bytes(b"words")
        raws(Input(location=str(tmp_path / "plain")), tmp_path)
    assert raws(Input(location=str(tmp_path / "plain"), format="text"), tmp_path) == [b"words"]


@pytest.mark.parametrize(
    "head", [b"PK\x03\x04 zip", b"BZh9 bzip2", b"\xfd7zXZ\0 xz", b"7z\xbc\xaf\x27\x1c 7z", b"\x1f\x8b\x08zzz"]
)
def test_other_formats_are_refused_with_those_that_are_known(tmp_path, head):
    (tmp_path / "x").write_bytes(head + bytes(40))
    archive = "" if head.startswith(b"\x1f") else head.split()[-1].decode("latin-1")
    with refused("E-INPUT-FORMAT", name="x", archive=archive):
        raws(Input(location=str(tmp_path / "x")), tmp_path)


def test_folders(tmp_path, contents):
    root = tmp_path / "root"
    (root / "en").mkdir(parents=True)
    (root / "de").mkdir()
    for folder in ("en", "de"):
        (root / folder / "part.jsonl").write_bytes(contents["j.jsonl"])
    (root / "x.warc").write_bytes(WARC)
    (root / "README.md").write_bytes(b"about")
    found = expand([str(root)], "crawl", cache=tmp_path)
    assert [(one.name, one.source) for one in found] == [
        ("x.warc", "crawl"),
        ("de__part.jsonl", "crawl"),
        ("en__part.jsonl", "crawl"),
    ]
    ids = {next(read(one, tmp_path))[0].id for one in found}
    assert len(ids) == 3
    assert [one.name for one in expand([f"{root}/*.warc"], "web", cache=tmp_path)] == ["x.warc"]
    (code,) = expand([str(root)], "code", cache=tmp_path, format="folder")
    assert code.name == "root" and b"about" in raws(code, tmp_path)
    with refused("E-INPUT-FOLDER", format="jsonl"):
        raws(replace(code, format="jsonl"), tmp_path)
    with refused("E-INPUT-FOLDER", format="folder"):
        raws(Input(location=str(root / "x.warc"), format="folder"), tmp_path)


def test_links_in_a_folder_are_not_left_out_in_silence(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "blob").write_bytes(b'{"text": "row"}\n')
    (root / "a.jsonl").symlink_to(tmp_path / "blob")
    with refused("E-INPUT-LINK", folder=str(root)):
        expand([str(root)], "web", cache=tmp_path)
    (one,) = expand([f"{root}/*"], "web", cache=tmp_path)
    assert raws(one, tmp_path) == [b"row"]


def test_words_that_name_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    for word in (
        "none.warc",
        str(tmp_path / "folder"),
        "*.nothing",
        "",
        "a\0b",
        "ftp://a.example/x",
        "cc:2024",
        "cc:CC-MAIN-2024-10/wat",
    ):
        with pytest.raises(ConfigError):
            expand([word], "web", cache=tmp_path)
    with refused("E-INPUT-SETTINGS"):
        expand([], "web", cache=tmp_path, format="zip")


def test_names_are_unique(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_bytes(b"x")
    with refused("E-INPUT-NAME", name="x.txt", count=2):
        expand([str(tmp_path / "a" / "x.txt"), str(tmp_path / "b" / "x.txt")], "web", cache=tmp_path)


def test_remote_names():
    def name(location):
        return Input(location=location).name

    assert name("https://a.example/x/CC-MAIN-1.warc.gz") == "CC-MAIN-1.warc.gz"
    assert name("s3://b/k/f%20g.jsonl") == "f_g.jsonl" and name("https://a.example/") == "a.example"
    assert name("https://a.example/get.jsonl?id=1") != name("https://a.example/get.jsonl?id=2")
    assert "/" not in name("https://a.example/..%2f..%2fetc%2fpasswd")


def test_identity_of_files_and_folders(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.py").write_bytes(b"x = 1\n")
    one, folder = Input(location=str(tmp_path / "f" / "a.py")), Input(location=str(tmp_path / "f"), format="folder")
    assert identity(one, tmp_path) == {"name": "a.py", "bytes": 6, "sha256": hashlib.sha256(b"x = 1\n").hexdigest()}
    before = identity(folder, tmp_path)
    assert before["name"] == "f" and before["bytes"] == 6 and identity(folder, tmp_path) == before
    (tmp_path / "f" / "b.py").symlink_to("a.py")
    assert identity(folder, tmp_path)["sha256"] != before["sha256"]
    with refused("E-INPUT-READ-FAILED", path=str(tmp_path / "none")):
        identity(Input(location=str(tmp_path / "none")), tmp_path)


def test_remote_input_from_words_to_documents(site, tmp_path):
    site.files["/dump.jsonl.gz"] = gzip.compress(b'{"body": "one"}\n{"body": "two"}\n')
    (one,) = expand(
        [f"{site.url}/dump.jsonl.gz"], "books", cache=tmp_path, fields=Fields(text="body"), rules=site.rules
    )
    known = identity(one, tmp_path, site.rules)
    assert known["name"] == "dump.jsonl.gz" and known["bytes"] == len(site.files["/dump.jsonl.gz"])
    assert raws(one, tmp_path, rules=site.rules, known=known) == [b"one", b"two"]
    site.files["/dump.jsonl.gz"] += b"more"
    assert raws(one, tmp_path, rules=site.rules, known=known) == [b"one", b"two"]
    forget(one, tmp_path)
    assert not list(tmp_path.glob("*/whole"))
    with refused("E-REMOTE-CHANGED"):
        raws(one, tmp_path, rules=site.rules, known=known)


def test_errors_name_the_file_where_it_is(site, tmp_path):
    site.files["/x.warc.gz"] = b"<html>Please log in</html>"
    with refused("E-WARC-NONE", path=f"{site.url}/x.warc.gz"):
        raws(Input(location=f"{site.url}/x.warc.gz"), tmp_path, rules=site.rules)


def test_private_addresses_are_refused_for_inputs(site, tmp_path):
    site.files["/x.jsonl"] = b"{}"
    rules = replace(site.rules, allow_hosts=(), common_crawl="https://data.commoncrawl.org")
    with refused("E-URL-PRIVATE"):
        raws(Input(location=f"{site.url}/x.jsonl"), tmp_path, rules=rules)
    assert not site.requests


NAME = "CC-MAIN-2024-10"


@pytest.fixture
def crawl(site):
    paths = [f"crawl-data/{NAME}/segments/1/{{}}/CC-MAIN-{n:05d}.warc{{}}.gz" for n in range(20)]
    for kind, suffix in (("warc", ""), ("wet", ".wet")):
        names = [path.format(kind, suffix) for path in paths]
        site.files[f"/crawl-data/{NAME}/{kind}.paths.gz"] = gzip.compress("\n".join(names).encode() + b"\n")
    site.files["/" + paths[3].format("warc", "")] = gzip.compress(WARC)
    return site


def test_common_crawl_by_name(crawl, tmp_path):
    def named(word):
        return expand([word], "web", cache=tmp_path, rules=crawl.rules)

    assert len(named(f"cc:{NAME}")) == 20
    assert [one.name for one in named(f"cc:{NAME}/wet#2-4")] == [f"CC-MAIN-{n:05d}.warc.wet.gz" for n in (2, 3, 4)]
    (one,) = named(f"cc:{NAME}#3")
    assert len(crawl.requests) == 2  # lists are kept
    known = identity(one, tmp_path, crawl.rules)
    assert known["common_crawl"].startswith(NAME) and len(crawl.requests) == 2
    assert raws(one, tmp_path, rules=crawl.rules, known=known) == [b"<p>A page</p>"]
    for word in (f"cc:{NAME}#20", f"cc:{NAME}#4-3", f"cc:{NAME}/warc#0-20"):
        with refused("E-CRAWL-RANGE", files=20):
            named(word)
    with refused("E-REMOTE-MISSING", status=404):
        named("cc:CC-MAIN-2025-99")


def test_lists_of_paths_of_other_hosts(crawl, tmp_path):
    word = f"{crawl.url}/crawl-data/{NAME}/warc.paths.gz"
    found = expand([word], "web", cache=tmp_path, rules=crawl.rules)
    assert found[3].location == f"{crawl.url}/crawl-data/{NAME}/segments/1/warc/CC-MAIN-00003.warc.gz"


@pytest.mark.parametrize(
    "line",
    ["../../etc/passwd", "/etc/passwd", "http://169.254.169.254/", "//evil.example/x", "a/../b", "x" * 2000, "a b"],
)
def test_hostile_lists(crawl, tmp_path, line):
    crawl.files[f"/crawl-data/{NAME}/warc.paths.gz"] = gzip.compress(b"good/path.warc.gz\n" + line.encode())
    with refused("E-CRAWL-LIST", line=2):
        expand([f"cc:{NAME}"], "web", cache=tmp_path, rules=crawl.rules)
