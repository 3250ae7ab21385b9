"""Formats of plug-ins: how files are recognized, and what happens when a reader is wrong."""

import contextlib
import dataclasses
import sqlite3

import pytest
from tests.expect import named, refused
from tests.unit.plugins.data_plugins import EXAMPLES, plugins  # noqa: F401

from ingot.data.build.corpus_build import build_corpus
from ingot.data.build.plugin_code import check_parts
from ingot.data.filters.quality import PRESETS
from ingot.data.sources.bounded import Limits
from ingot.data.sources.input import BadInput, Input, expand, read
from ingot.data.sources.sniff import format_by_name
from ingot.data.tasks.local import Local
from ingot.data.tasks.run import Inline
from ingot.plugins.source import FORMATS

GOOD = 'Document(document_id(name, "1", "u"), "u", source, name, "1", raw=b"a text", content_type="text/plain")'


def reader(body: str, more: str = "") -> str:
    return f"""
    def read_odd(path, name, source, limits, settings):
        good = {GOOD}
        {body}
    FORMATS.register(InputFormat(name="odd", read=read_odd, endings=("odd", "odd.lz"){more}))
    """


def pairs_of(plugins, tmp_path, body, limits=None):  # noqa: F811
    plugins.write("odd_reader", reader(body))
    plugins.recipe("", "odd_reader")
    (tmp_path / "a.odd").write_bytes(b"x")
    return read(Input(location=str(tmp_path / "a.odd")), tmp_path, limits)


def test_files_are_recognized_by_their_ending(plugins, tmp_path):  # noqa: F811
    plugins.write("odd_reader", reader("yield good, None"))
    plugins.recipe("", "odd_reader")
    names = ("a.odd", "a.ODD", "a.odd.lz", "a.odd.gz", "odd", "a.jsonl", "a.warc.gz", "a.gz")
    assert [format_by_name(name) for name in names] == ["odd", "odd", "odd", "", "", "jsonl", "warc", ""]
    plugins.write("packed", 'FORMATS.register(InputFormat(name="p", read="x:y", endings=("p",), packed=True))')
    plugins.recipe("", "packed")
    assert (format_by_name("a.p.zst"), format_by_name("a.p")) == ("p", "p")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/b.odd").write_bytes(b"")
    assert [one.name for one in expand([str(tmp_path / "inside")], cache=tmp_path)] == ["b.odd"]


def test_a_format_is_named_with_the_nearest_one(plugins, tmp_path):  # noqa: F811
    plugins.write("odd_reader", reader("yield good, None"))
    plugins.recipe("", "odd_reader")
    (tmp_path / "a.dump").write_bytes(b"x")
    (one,) = expand([str(tmp_path / "a.dump")], format="odd", cache=tmp_path)
    assert [document.raw for document, _ in read(one, tmp_path)] == [b"a text"]
    with refused("E-INPUT-SETTINGS") as caught:
        expand([str(tmp_path / "a.dump")], format="od", cache=tmp_path)
    assert "did you mean 'odd'" in caught.value.found


def test_an_ending_belongs_to_one_format(plugins):  # noqa: F811
    plugins.write("taken", 'FORMATS.register(InputFormat(name="odd", read="x:y", endings=("tgz",)))')
    with refused("E-FORMAT-ENDING", ending="tgz"):
        plugins.recipe("", "taken")
    assert "odd" not in FORMATS


def test_a_document_over_the_limit_is_dropped(plugins, tmp_path):  # noqa: F811
    limits = Limits(1 << 16, 5, 1 << 12)
    ((document, drop),) = pairs_of(plugins, tmp_path, "yield good, None", limits)
    assert (drop.rule, drop.value, document.raw, document.record_id) == ("read.too_large", "6 bytes", b"", "1")


@pytest.mark.parametrize(
    "body",
    [
        "yield good",
        "yield 'a text', None",
        "yield None",
        "yield good, 'read.bad'",
        "yield good, Drop('odd', 'odd.bad')",
        "yield good, Drop('read', 'bad')",
        "good.id = 'x'; yield good, None",
        "good.raw = 'a text'; yield good, None",
        "good.url = None; yield good, None",
        "good.file = 'other'; yield good, None",
        "good.source = 'other'; yield good, None",
        "good.notes['x'] = []; yield good, None",
        "return None",
    ],
)
def test_a_wrong_record_ends_the_build(plugins, tmp_path, body):  # noqa: F811
    with refused("E-DATA-PLUGIN-RESULT", part="format 'odd' of plug-in odd_reader"):
        list(pairs_of(plugins, tmp_path, body))


DAMAGED = "raise __import__('gzip').BadGzipFile('no gzip')"


@pytest.mark.parametrize("error", ["1 / 0", "raise EOFError", DAMAGED])
def test_a_reader_that_raises_leaves_out_the_rest_of_its_input(plugins, tmp_path, error):  # noqa: F811
    pairs = pairs_of(plugins, tmp_path, f"yield good, None; {error}")
    assert next(pairs)[0].raw == b"a text"
    with pytest.raises(BadInput) as caught:
        next(pairs)
    assert named([caught.value.found], "a.odd", "plug-in odd_reader") and "odd_reader.py:" in caught.value.found


@pytest.mark.parametrize("error", ["raise OSError(5, 'no disk')", "open('/nowhere')", "raise ConnectionError"])
def test_an_error_of_the_disk_or_network_ends_the_build(plugins, tmp_path, error):  # noqa: F811
    pairs = pairs_of(plugins, tmp_path, f"yield good, None; {error}")
    assert next(pairs)[0].raw == b"a text"
    part = "format 'odd' of plug-in odd_reader"
    with refused("E-INPUT-READ-FAILED", path=str(tmp_path / "a.odd"), part=part) as caught:
        next(pairs)
    assert named([caught.value.found], part, "a.odd") and "odd_reader.py:" in caught.value.found
    assert not isinstance(caught.value, BadInput)  # which would leave out the rest of the input


@pytest.mark.parametrize("runner", [Inline, lambda: Local(1)])
def test_an_error_in_the_middle_of_a_file_ends_a_build_of_several_inputs(plugins, tmp_path, runner):  # noqa: F811
    """No corpus is written that lacks the rest of the file, also if other inputs and the documents before are good."""
    body = """
        from pathlib import Path
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if line == b"unreadable\\n":
                    Path("/proc/self/mem").open("rb", buffering=0).read(1)
                yield Document(document_id(name, str(number), ""), "", source, name, str(number), raw=line * 30,
                               content_type="text/plain"), None
    """
    plugins.write("odd_reader", reader(body))
    recipe = plugins.recipe("[language]\nenabled = false", "odd_reader")
    recipe = dataclasses.replace(recipe, quality=PRESETS["none"])
    (tmp_path / "a.odd").write_bytes(b"one\ntwo\n")
    (tmp_path / "b.odd").write_bytes(b"one\nunreadable\nthree\n")
    inputs = [Input(location=str(tmp_path / name)) for name in ("a.odd", "b.odd")]
    with contextlib.ExitStack() as stack:
        there = runner()
        if isinstance(there, Local):
            stack.enter_context(there)
        with refused("E-INPUT-READ-FAILED", path=str(tmp_path / "b.odd"), part="format 'odd' of plug-in odd_reader"):
            build_corpus(inputs, tmp_path / "corpus", recipe, runner=there)
    assert not (tmp_path / "corpus").exists()


def test_an_input_whose_disk_failed_is_read_whole_by_the_next_build(plugins, tmp_path):  # noqa: F811
    body = f"""
        from pathlib import Path
        mark = Path({str(tmp_path / "mark")!r})
        for number in range(3):
            text = (f"The pages of book {{number}} are about a river and of towns. " * 9).encode()
            yield Document(document_id(name, str(number), ""), "", source, name, str(number), raw=text,
                           content_type="text/plain"), None
            if not mark.exists():
                mark.touch()
                raise OSError(5, "no disk")
    """
    plugins.write("odd_reader", reader(body))
    recipe = plugins.recipe("[language]\nenabled = false", "odd_reader")
    recipe = dataclasses.replace(recipe, quality=PRESETS["none"])
    (tmp_path / "a.odd").write_bytes(b"x")
    one = Input(location=str(tmp_path / "a.odd"))
    with refused("E-INPUT-READ-FAILED"):
        build_corpus([one], tmp_path / "corpus", recipe)
    assert build_corpus([one], tmp_path / "corpus", recipe).funnel[0].documents_in == 3


def test_a_setting_that_is_missing_is_reported_before_the_build(plugins, tmp_path):  # noqa: F811
    (tmp_path / "sqlite_source.py").write_text((EXAMPLES / "sqlite_source.py").read_text())
    recipe = plugins.recipe("", "sqlite_source")
    with refused("E-CONFIG-SETTINGS"):
        check_parts(recipe, [Input(location="a.sqlite")])
    check_parts(recipe, [Input(location="a.warc.gz")])


def test_rows_of_the_example_are_read_one_at_a_time(plugins, tmp_path):  # noqa: F811
    (tmp_path / "sqlite_source.py").write_text((EXAMPLES / "sqlite_source.py").read_text())
    recipe = plugins.recipe("[format.sqlite]\ntable = 'my pages'\nurl = ''", "sqlite_source")
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute('create table "my pages" (text)')
        rows = [("a",), ("",), (None,), (7,), ("b",)]
        database.executemany('insert into "my pages" values (?)', rows)
    database.close()
    pairs = list(read(Input(location=str(tmp_path / "a.db")), tmp_path, tables=recipe.format))
    assert [drop.rule if drop else document.raw for document, drop in pairs] == [b"a"] + ["read.empty_body"] * 3 + [
        b"b"
    ]
    assert pairs[0][0].url == "file:a.db!row-1"
    (tmp_path / "b.db").write_bytes(b"no database")
    with pytest.raises(BadInput) as caught:
        list(read(Input(location=str(tmp_path / "b.db")), tmp_path, tables=recipe.format))
    assert "file is not a database (sqlite_source.py:" in caught.value.found
