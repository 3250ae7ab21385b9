"""The pages about plug-ins of data builds: their contracts and code are those of the source, and they run."""

import inspect
import json
import re
import sqlite3
from pathlib import Path

import pytest
from tests.unit.data.conftest import english, write_crawl
from tests.unit.plugins.data_plugins import EXAMPLES, document, plugins  # noqa: F401

from ingot.cli.main import main
from ingot.data.build.corpus import load_corpus
from ingot.data.build.own_filters import make_extract, make_pii
from ingot.data.build.recipe import load_recipe
from ingot.plugins.extractor import Extractor
from ingot.plugins.filters import DocumentStage, Filter
from ingot.plugins.mixture import MixturePolicy
from ingot.plugins.pii import PiiKind
from ingot.plugins.source import InputFormat
from ingot.schema.corpus import Document, Drop

PAGES = Path(__file__).parents[3] / "docs" / "extend"
CONTRACTS = {
    "filter": [Filter, DocumentStage, Document, Drop],
    "source": [InputFormat],
    "extractor": [Extractor],
    "pii": [PiiKind],
    "mixture": [MixturePolicy],
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(("page", "contracts"), CONTRACTS.items())
def test_a_page_shows_the_contract(page, contracts):
    assert blocks(page, "python")[: len(contracts)] == [inspect.getsource(one) for one in contracts]
    for contract in contracts:
        assert len(inspect.getsource(contract).splitlines()) <= 40


@pytest.mark.parametrize(("page", "file"), [("filter", "domain_filter.py"), ("source", "sqlite_source.py")])
def test_a_page_shows_the_whole_example(page, file):
    code = (EXAMPLES / file).read_text()
    assert code in blocks(page, "python")
    assert len(code.splitlines()) <= 60


def written(folder: Path, page: str) -> Path:
    """Write the example and the recipe of a page into `folder`; return the path of the recipe."""
    text = (PAGES / f"{page}.md").read_text()
    ((name, code),) = re.findall(r"`(?:examples/extend/)?(\w+\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL)
    (folder / name).write_text(code)
    (folder / "recipe.toml").write_text(blocks(page, "toml")[0])
    return folder / "recipe.toml"


def test_the_test_of_the_page_passes(plugins, monkeypatch):  # noqa: F811
    monkeypatch.syspath_prepend(str(EXAMPLES))
    exec(blocks("filter", "python")[-1], {})


def test_the_extractor_of_the_page(plugins, tmp_path):  # noqa: F811
    stage = make_extract(load_recipe(written(tmp_path, "extractor")))
    page = document(raw=b"<html><p>short</p><P class=x>one two three four five six <b>seven</b> eight nine ten</p>")
    assert stage(page) is None
    assert page.text == "one two three four five six seven eight nine ten"


def test_the_kind_of_the_page(plugins, tmp_path):  # noqa: F811
    stage = make_pii(load_recipe(written(tmp_path, "pii")))
    page = document("The badge B-123456 is not B-12345. " + "The people of the house read the story. " * 5)
    assert stage is not None and stage(page) is None
    assert page.text.startswith("The badge <BADGE> is not B-12345.")


def test_the_filter_the_source_and_the_mixture_of_the_pages(plugins, tmp_path, capsys):  # noqa: F811
    pages = [(f"http://{host}/{n}", english(n), 200) for n, host in enumerate(["www.example.org", "other.org"] * 4)]
    crawl = write_crawl(tmp_path / "crawl.warc.gz", pages)
    with sqlite3.connect(tmp_path / "books.db") as database:
        database.execute("create table books (content text, url text)")
        database.executemany("insert into books values (?, '')", [(english(n),) for n in range(20, 28)])
    database.close()
    out = ["--out", str(tmp_path / "data"), "--vocab-size", "300", "--runner", "inline", "-q"]
    recipe = written(tmp_path, "filter")
    code = tmp_path / "code.jsonl"
    code.write_text("".join(json.dumps({"text": english(n)}) + "\n" for n in range(40, 43)))
    words = ["data", "build", str(crawl), "--source", "code", str(code), "--recipe", str(recipe)]
    assert main([*words, *out]) == 0
    funnel = {stage.name: stage for stage in load_corpus(tmp_path / "data/corpus").funnel}
    assert funnel["domain"].dropped == {"domain.other": 4}
    recipe = written(tmp_path, "source")
    words = ["data", "build", str(crawl), "--source", "books", str(tmp_path / "books.db"), "--recipe", str(recipe)]
    out[1] = str(tmp_path / "library")
    assert main([*words, *out]) == 0
    capsys.readouterr()
    recipe = written(tmp_path, "mixture")
    assert main(["data", "mix", str(tmp_path / "library"), "--recipe", str(recipe), "--preset", "temperature"]) == 0
    assert "weights are sizes to the power of 0.5" in capsys.readouterr().out
