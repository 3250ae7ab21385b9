import json

import pytest
from tests.expect import reported

from ingot.cli.main import main


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("the cat sat on the mat, the dog did not\n" * 40)
    return path


def test_train_then_show(text, tmp_path, capsys):
    out = tmp_path / "t.json"
    assert main(["tokenizer", "train", str(text), "--vocab-size", "280", "--out", str(out), "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["vocabulary"] <= 280
    assert main(["tokenizer", "show", str(out), "--text", "the cat", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "".join(shown["pieces"]) == "the cat"
    assert shown["sha256"] == trained["sha256"]
    assert main(["tokenizer", "show", str(out), "--text", "the cat"]) == 0
    printed = capsys.readouterr().out
    assert "tiktoken" in printed
    assert "'the'" in printed


def test_train_replaces_a_file_only_with_force(text, tmp_path, capsys):
    out = tmp_path / "t.json"
    out.write_text("mine")
    train = ["tokenizer", "train", str(text), "--vocab-size", "270", "--out", str(out)]
    assert main([*train, "--json"]) == 3
    reported(capsys.readouterr().out, "E-TOKENIZER-EXISTS", path=str(out))
    assert out.read_text() == "mine"
    assert main([*train, "--force"]) == 0
    assert "only" not in capsys.readouterr().out


def test_train_says_when_the_text_is_too_small_and_shows_no_broken_characters(text, tmp_path, capsys):
    train = ["tokenizer", "train", str(text), "--vocab-size", "5000", "--out", str(tmp_path / "t.json")]
    assert main(train) == 0
    printed = capsys.readouterr().out
    assert "of 5,000 tokens" in printed
    assert "tokens of a sample" in printed
    assert "(part of a character) x" in printed
    assert "\ufffd" not in printed


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (["show", "missing.json"], 2, "E-TOKENIZER-UNREADABLE"),
        (["train", "missing.txt"], 2, "E-TOKENIZER-INPUT"),
        (["train", "{text}", "--vocab-size", "10"], 3, "E-TOKENIZER-VOCABULARY-SIZE"),
        (["show", "{text}"], 3, "E-TOKENIZER-FORMAT"),
    ],
)
def test_mistakes_have_their_exit_codes(text, arguments, exit_code, code, capsys):
    assert main(["tokenizer", *(a.format(text=text) for a in arguments), "--json"]) == exit_code
    assert reported(capsys.readouterr().out, code)["rule"]
