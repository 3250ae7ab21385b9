"""The blocks of docs/api.md run in their order."""

import os
import re
import shutil
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
BEFORE, TRAIN, AFTER = PAGE.partition("\n## Train\n")


def run_blocks(text: str, folder: Path, crawl_file: Path, monkeypatch) -> dict:
    """Run the Python blocks of `text`, with common names, in a folder with a crawl. Returns the names."""
    shutil.copy(crawl_file, folder / "crawl.warc.gz")
    monkeypatch.chdir(folder)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```") // 2 > 0
    for block in blocks:
        line = PAGE[: PAGE.index(block)].count("\n")
        exec(compile("\n" * line + block, "docs/api.md", "exec"), names)
    return names


def test_the_blocks_that_train_nothing(tmp_path, crawl_file, monkeypatch, capsys):
    pytest.importorskip("torch")
    names = run_blocks(BEFORE, tmp_path, crawl_file, monkeypatch)
    assert names["corpus"].sources == {"web": 40} and names["copy"].exact and len(names["unique"]) == 40
    assert names["verdict"].rule == "gopher.word_count" and names["checked"].ok
    printed = capsys.readouterr().out
    assert "[(5, (2, 32)), (6, (2, 32)), (7, (2, 32)), (8, (2, 32))]" in printed
    assert "http://a.example/missing read.http_status 404" not in printed  # the loop ends at the first good page


@pytest.mark.slow
def test_all_blocks(tmp_path, crawl_file, monkeypatch):
    pytest.importorskip("torch")
    assert TRAIN and os.cpu_count()
    names = run_blocks(PAGE, tmp_path, crawl_file, monkeypatch)
    assert names["result"].finished and names["run"].metrics()["step"] == [1, 2, 3, 4]
    assert names["exported"].max_logit_difference <= 1e-5 and (tmp_path / "reports" / "demo" / "report.html").is_file()
