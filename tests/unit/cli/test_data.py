import argparse
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.expect import named, reported

from ingot.api.building import find_runner
from ingot.cli.data import build
from ingot.cli.main import main


@pytest.fixture
def crawl_files(tmp_path):
    path = Path(__file__).parents[1] / "data" / "conftest.py"
    spec = importlib.util.spec_from_file_location("crawl_for_cli", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages = [(f"http://a.example/{n}", module.english(n), 200) for n in range(4)]
    pages += [("http://a.example/x", "too short to stay", 200), ("http://a.example/y", "gone", 404)]
    return [str(module.write_crawl(tmp_path / "crawl.warc.gz", pages))]


@pytest.fixture
def built(crawl_files, tmp_path, capsys):
    out = str(tmp_path / "data")
    assert main(["data", "build", *crawl_files, "--out", out, "--vocab-size", "300", "--workers", "1"]) == 0
    capsys.readouterr()
    return out


def test_build_prints_the_funnel_and_what_comes_next(crawl_files, tmp_path, capsys):
    arguments = ["data", "build", *crawl_files, "--out", str(tmp_path / "d"), "--vocab-size", "300", "--workers", "1"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "6 records" in text
    assert "lid.176" in text
    assert re.search(r"no\s+classifier", text)
    assert "Next:" in text
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fresh"] is False
    assert facts["corpus"]["funnel"][0]["documents_in"] == 6
    assert main(arguments) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_files_of_several_sources(crawl_files, tmp_path, capsys):
    law = shutil.copy(crawl_files[0], tmp_path / "law.warc.gz")
    build = [
        "data",
        "build",
        "--source",
        "law",
        str(law),
        "--out",
        str(tmp_path / "d"),
        "--vocab-size",
        "300",
        "--json",
    ]
    assert main(build) == 0
    assert json.loads(capsys.readouterr().out)["corpus"]["sources"] == {"law.warc.gz": "law"}
    assert main([*build[:6], str(tmp_path / "e"), *build[7:], *crawl_files]) == 0
    assert json.loads(capsys.readouterr().out)["corpus"]["sources"] == {"law.warc.gz": "law", "crawl.warc.gz": "web"}
    assert main([*build, "--source", "news"]) == 2
    reported(capsys.readouterr().out, "E-SOURCE-INPUTS")


def test_inspect_suggests_the_rule_and_the_setting(built, capsys):
    assert main(["data", "inspect", built]) == 0
    assert "read.http_status" in capsys.readouterr().out
    assert main(["data", "inspect", built, "--dropped-by", "read.http_status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"][0]["url"] == "http://a.example/y"
    assert main(["data", "inspect", built, "--dropped-by", "read.http_statu", "--json"]) == 2
    reported(capsys.readouterr().out, "E-RULE-UNKNOWN", rule_or_stage="read.http_statu", close="read.http_status")


def test_inspect_hints_a_setting_that_can_be_given_as_it_stands(crawl_files, built, tmp_path, capsys):
    assert main(["data", "inspect", built]) == 0
    assert "gopher.word_count" in capsys.readouterr().out
    assert main(["data", "inspect", built, "--dropped-by", "gopher.word_count"]) == 0
    hint = re.search(r"--set '(.*?)'", capsys.readouterr().out)
    assert hint and hint[1] == "quality.gopher.word_count=[50, 100000]"
    again = ["data", "build", *crawl_files, "--out", str(tmp_path / "again"), "--vocab-size", "300", "--workers", "1"]
    assert main([*again, "--set", hint[1]]) == 0


def test_what_is_no_crawl_file_and_no_recipe_are_two_errors(crawl_files, tmp_path, capsys):
    (tmp_path / "bare").mkdir()
    (tmp_path / "empty.warc.gz").touch()
    build = ["data", "build", "--out", str(tmp_path / "d")]
    for arguments, exit_code, code, facts in (
        ([str(tmp_path / "bare")], 3, "E-INPUT-NOTHING", {"word": str(tmp_path / "bare")}),
        ([str(tmp_path / "empty.warc.gz")], 20, "E-INPUT-UNREADABLE", {"inputs": ["empty.warc.gz"]}),
        ([*crawl_files, "--recipe", "nope.toml"], 3, "E-RECIPE-MISSING", {"path": "nope.toml"}),
    ):
        assert main([*build, *arguments, "--json"]) == exit_code
        reported(capsys.readouterr().out, code, **facts)


def test_a_column_with_another_name_is_told_with_the_setting(tmp_path, capsys):
    """150 rows: more than are looked at for the names of the columns."""
    (tmp_path / "other.jsonl").write_text('{"content": "A text.", "id": 1}\n' * 150)
    (tmp_path / "short.jsonl").write_text('{"text": "A text."}\n')
    build = ["data", "build", "--out", str(tmp_path / "d"), "--runner", "inline", "--json"]
    for files, code in (["other"], "E-INPUT-UNREADABLE"), (["other", "short"], "E-CORPUS-EMPTY"):
        assert main([*build, *(str(tmp_path / f"{file}.jsonl") for file in files)]) == 20
        error = reported(capsys.readouterr().out, code)
        assert named([error["found"]], "no column 'text'; its columns are content, id", "other.jsonl text=content")


def test_inspect_says_that_no_page_matches(built, capsys):
    assert main(["data", "inspect", built, "--url", "nosuch"]) == 0
    text = capsys.readouterr().out
    assert "no page kept matches url nosuch" in text
    assert "records" not in text and "0 of 0" not in text


def test_a_crawl_file_that_is_cut_is_reported(crawl_files, tmp_path, capsys):
    path = Path(crawl_files[0])
    path.write_bytes(path.read_bytes()[:-40])
    out = str(tmp_path / "d")
    assert main(["data", "build", str(path), "--out", out, "--vocab-size", "300", "--workers", "1"]) == 0
    assert "warning: crawl.warc.gz is cut at offset" in capsys.readouterr().out
    assert main(["data", "inspect", out]) == 0
    assert "warning: crawl.warc.gz is cut at offset" in capsys.readouterr().out
    assert main(["data", "inspect", out, "--dropped-by", "read.truncated_file"]) == 0
    assert "in crawl.warc.gz" in capsys.readouterr().out


def test_verify_reports_damage(built, capsys):
    assert main(["data", "verify", built]) == 0
    assert "kept documents" in capsys.readouterr().out
    next(Path(built, "corpus").glob("web-*")).write_bytes(b"x")
    assert main(["data", "verify", built]) == 20
    assert capsys.readouterr().err.startswith("E-CORPUS-")


def test_errors_have_their_exit_codes(crawl_files, tmp_path, capsys):
    out = str(tmp_path / "d")
    build = ["data", "build", *crawl_files, "--out", out, "--workers", "1"]
    typo = "quality.gopher.symbol_rato"
    assert main([*build, "--set", f"{typo}=1", "--json"]) == 3
    reported(capsys.readouterr().out, "E-CONFIG-SETTINGS", meant={typo: ["quality.gopher.symbol_ratio"]})
    assert main([*build, "--set", "language.keep=['fr']", "--json"]) == 20
    error = reported(capsys.readouterr().out, "E-CORPUS-EMPTY")
    assert error["facts"]["dropped_by"][0] == "language.other" and named([error["fix"]], "--dropped-by language.other")
    assert main(["data", "inspect", out, "--dropped-by", "language.other"]) == 0
    assert main(["data", "build", str(tmp_path / "absent"), "--out", out]) == 3
    assert main(["data", "inspect", str(tmp_path)]) == 20


def test_no_workers_are_refused(crawl_files, tmp_path, capsys):
    assert main(["data", "build", *crawl_files, "--out", str(tmp_path / "data"), "--workers", "-3", "--json"]) == 2
    reported(capsys.readouterr().out, "E-OPTION-RANGE", option="workers", value=-3)


@pytest.mark.parametrize(
    ("options", "code", "facts"),
    [
        ("--slurm partition=cpu", "E-RUNNER-OPTION", {"option": "--slurm", "runner": "local"}),
        ("--ray-address auto", "E-RUNNER-OPTION", {"option": "--ray-address", "runner": "local"}),
        ("--runner inline --workers 3", "E-RUNNER-OPTION", {"option": "--workers", "runner": "inline"}),
        ("--runner slurm --slurm cpus=many", "E-OPTION-RANGE", {"option": "slurm cpus", "value": "many"}),
        ("--runner slurm --slurm partition", "E-SLURM-FORM", {"given": "partition"}),
        ("--runner slurm --slurm array=0-3", "E-SLURM-RESERVED", {"key": "array"}),
    ],
)
def test_options_of_another_runner_are_refused(options, code, facts, crawl_files, tmp_path, capsys):
    assert main(["data", "build", *crawl_files, "--out", str(tmp_path / "data"), *options.split(), "--json"]) == 2
    reported(capsys.readouterr().out, code, **facts)
    assert not (tmp_path / "data").exists()


def test_options_reach_their_runner():
    def runner(options) -> Any:
        parser = argparse.ArgumentParser()
        build.configure_build(parser)
        args = parser.parse_args(["x", "--out", "d", *options.split()])
        return find_runner(args.runner, args.workers, args.memory, args.ray_address, args.slurm)

    slurm = runner("--runner slurm --workers 7 --memory 3GiB --slurm cpus=4 --slurm partition=cpu --slurm account=me")
    assert (slurm.max_parallel, slurm.cpus, slurm.lines) == (7, 4, ("--account=me",))
    assert slurm.options["partition"] == "cpu"
    ray = runner("--runner ray --workers 7 --memory 3GiB --ray-address auto")
    assert (ray.address, ray.max_parallel) == ("auto", 7)
    local = runner("--workers 3 --memory 3GiB")
    assert local.workers == 3
    assert local.memory_bytes == ray.memory_bytes == slurm.memory_bytes == 3 << 30


def test_a_folder_that_is_not_there_is_missing_and_not_damaged(tmp_path):
    assert main(["data", "verify", str(tmp_path / "nowhere")]) == 3
