"""`ingot data mix`, each of its ways, on folders of a few kilobytes."""

import argparse
import json

import pytest
from tests.expect import refused

from ingot.cli.data import mix
from ingot.cli.terminal import Terminal
from ingot.theory.rules import load_run

from .test_ablation import forked


def parsed(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    mix.configure_mix(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.fixture
def verb(token_folders, capsys):
    def run(*words: object) -> dict:
        capsys.readouterr()
        mix.run_mix(parsed(token_folders, *words), Terminal(json_mode=True))
        return json.loads(capsys.readouterr().out)

    return run


def test_by_hand_with_caps(verb):
    natural = verb()
    assert set(natural["weights"]) == {"metal", "stone"} and natural["weights"]["metal"] > 0.6
    capped = verb("--weights", "metal=1", "stone=9", "--tokens", "8k", "--max-epochs", 4, "stone=1")
    metal, stone = capped["mixture"]["sources"]
    assert stone["epochs"] == 1 and metal["tokens"] + stone["tokens"] == 8000
    assert capped["mixture"]["notes"][0].startswith("stone: 90.0% wanted")
    with refused("E-SOURCE-UNKNOWN", source="ston"):
        verb("--weights", "ston=1")
    with refused("E-EPOCHS-FORM", given="x"):
        verb("--max-epochs", "x")


def test_it_is_printed_for_people(token_folders, capsys):
    mix.run_mix(parsed(token_folders, "--preset", "equal"), Terminal())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["source", "wanted", "share", "tokens", "of", "epochs"]
    assert any(line.startswith("stone") and "50.0%" in line for line in lines)


def test_the_run_file_gets_the_weights_and_says_the_budget(verb, make_run):
    folder = make_run(steps=10)
    written = verb("--weights", "metal=1", "stone=1", "--write", folder.config)
    config = load_run(folder.config)
    assert config.data.weights == written["weights"] == {"metal": 0.5, "stone": 0.5}
    assert written["mixture"]["tokens"] == 10 * config.tokens_per_step
    again = verb("--weights-from", folder.config, "--tokens", 100)
    assert again["weights"] == {"metal": 0.5, "stone": 0.5}


def test_doremi_writes_its_weights_and_uses_them(verb, tmp_path):
    out = tmp_path / "doremi.json"
    found = verb("--doremi", "--steps", 3, "--out", out, "--tokens", 100)
    assert found["doremi"]["steps"] == 3 and json.loads(out.read_text())["weights"] == found["doremi"]["weights"]
    assert found["weights"] == pytest.approx(found["doremi"]["weights"], abs=1e-6)
    assert verb("--weights-from", out, "--tokens", 100)["weights"] == pytest.approx(found["weights"], abs=1e-6)


def test_ablation_of_a_preset_and_a_file(token_folders, tmp_path, capfd):
    (tmp_path / "mine.toml").write_text("stone = 1.0\n")
    words = (token_folders, "--ablate", "equal", tmp_path / "mine.toml", "--steps", 1, "--out", tmp_path / "out")
    forked(lambda: mix.run_mix(parsed(*words), Terminal(json_mode=True)))
    found = json.loads(capfd.readouterr().out)
    assert {one["name"] for one in found["ablation"]["mixtures"]} == {"equal", "mine"}
    assert found["ablation"]["seeds"] == [1234, 1235] and (tmp_path / "out/ablation.json").exists()
    assert found["verdict"]
