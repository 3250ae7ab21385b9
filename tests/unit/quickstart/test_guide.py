from pathlib import Path

import pytest

from ingot.data.extract.html import Extract
from ingot.quickstart.guide import docstrings, prose, read_page, render_mirror, render_page, source_files, url_path
from ingot.schema.corpus import Document

SOURCE = '''# A licence line.
r"""The module reads a file and says what is in it.

    not prose
"""
import os

CODE = """
This template looks like prose but is a value, so it is left out.
"""

class Reader:
    """Reads :class:`~pkg.Record` objects from ``path`` in the *given* order.

    Parameters
    ----------
    path : str
        The file that is going to be read.
    limit : int

    Notes
    -----
    A reader does not keep the file open between two calls.

    >>> Reader("x").read()
    This is what the doctest prints, it seems.
    """

    def read(self, a="x:", *, b=None):
        """Return the next record or None at the end of the file.

        Args:
            a (str): The name of the field that is returned.

        Returns {a: b} in a dictionary of some kind.
        """

    async def close(self):
        "single quotes are too short to matter."
'''


def test_docstrings_are_found_with_their_owners():
    assert [name for name, _ in docstrings(SOURCE)] == ["", "Reader", "read"]


def test_prose_leaves_code_tables_and_markup_out():
    found = {name: prose(text) for name, text in docstrings(SOURCE)}
    assert found == {
        "": ["The module reads a file and says what is in it."],
        "Reader": [
            "Reads Record objects from path in the given order.",
            "The file that is going to be read.",
            "A reader does not keep the file open between two calls.",
        ],
        "read": [
            "Return the next record or None at the end of the file.",
            "The name of the field that is returned.",
        ],
    }


@pytest.mark.parametrize("source", ["", '"""', "\x00", '"""\\N{nope}"""', 'def f(:\n  """x', "'''a'''\n" * 3])
def test_odd_source_does_not_stop_the_crawl(source, tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(source)
    assert read_page("odd", file).sections == ()


def test_repeated_paragraphs_are_kept_once(tmp_path):
    file = tmp_path / "m.py"
    file.write_text("".join(f'def f{i}():\n    """The same sentence is in both functions."""\n' for i in range(2)))
    assert read_page("m", file).sections == (("f0", ("The same sentence is in both functions.",)),)


def test_extraction_gets_the_article_and_little_else(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(SOURCE)
    page = read_page("pkg.m", file)
    for html in (render_page(page, ["pkg.a", "pkg.b"]), render_mirror(page)):
        document = Document(
            id="", url="", source="", file="", record_id="", raw=html.encode(), content_type="text/html"
        )
        assert Extract()(document) is None
        assert "A reader does not keep the file open between two calls." in document.text.split("\n")
        assert "pkg.b" not in document.text and "Search" not in document.text


def test_sources_are_sorted_unique_and_not_tests():
    files = source_files()
    modules = [module for module, _ in files]
    assert modules == sorted(set(modules)) and "json.decoder" in modules and "antigravity" not in modules
    assert not any("tests" in module.split(".") for module in modules)
    assert all(isinstance(file, Path) for _, file in files[:3])
    assert url_path("json.decoder") == "/json/decoder.html"
