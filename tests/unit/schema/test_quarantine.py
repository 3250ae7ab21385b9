"""A quarantine list is read strictly, has each document once, and is never half written."""

import json
import os
from dataclasses import asdict, replace

import pytest
from tests.expect import refused

from ingot.schema.quarantine import QuarantineEntry, add_to_quarantine, documents_of, read_quarantine

ONE = QuarantineEntry(
    document="1" * 32, url="http://a.example/\udc80", reason="mojibake", run="r", step=7, date="2026-11-28"
)
TWO = replace(ONE, document="2" * 32, url="", text="a" * 32, reason="by_hand")


def test_each_document_is_listed_once_in_the_order_of_its_coming(tmp_path):
    path = tmp_path / "list.jsonl"
    assert add_to_quarantine(path, [ONE, replace(ONE, reason="entropy")]) == [ONE]
    assert add_to_quarantine(path, [replace(ONE, step=9), TWO]) == [TWO]
    first, second = read_quarantine(path)
    assert (first.document, first.reason, first.step, second) == (ONE.document, "mojibake", 7, TWO)
    assert documents_of(path) == {ONE.document, TWO.document}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps({"document": "1" * 32, "reason": "mojibake"}),
        json.dumps(asdict(TWO) | {"more": 1}),
        json.dumps(asdict(TWO) | {"document": "1" * 31 + "G"}),
        json.dumps(asdict(TWO) | {"document": 5}),
        json.dumps(asdict(TWO) | {"text": "1"}),
        json.dumps(asdict(TWO) | {"reason": "two.dots"}),
        json.dumps(asdict(TWO) | {"date": "28.11.2026"}),
        json.dumps(asdict(TWO) | {"step": -1}),
        json.dumps(asdict(TWO) | {"step": True}),
    ],
)
def test_a_line_that_is_no_entry_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps(asdict(TWO)) + "\n" + line + "\n")
    with refused("E-QUARANTINE-LINE", path=str(path), line=2):
        read_quarantine(path)
    with refused("E-QUARANTINE-LINE", line=2):  # and nothing is added to such a list
        add_to_quarantine(path, [replace(TWO, document="3" * 32)])


def test_without_a_list_or_a_line_there_is_nothing_to_leave_out(tmp_path):
    with refused("E-QUARANTINE-MISSING", path=str(tmp_path / "none")):
        read_quarantine(tmp_path / "none")
    (tmp_path / "empty").write_text("")
    assert read_quarantine(tmp_path / "empty") == ()
    with refused("E-QUARANTINE-EMPTY"):
        documents_of(tmp_path / "empty")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_list_as_it_was(tmp_path, monkeypatch, call):
    path = tmp_path / "list.jsonl"
    add_to_quarantine(path, [TWO])
    before = path.read_bytes()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, call, interrupt)
        add_to_quarantine(path, [ONE])
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["list.jsonl"]
    assert add_to_quarantine(path, [ONE]) == [ONE]
