"""Every option of every verb changes what the program does: its text, exit code, files, or the call that does the work.

`flags.txt` has a line for each option: a command, and indented below it the words that are added to it. The option is
the first of these words. All commands run in this process, in a copy of one small project. What would train, serve or
measure is replaced by a function that prints its arguments.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn", reason="needs the part web: pip install 'ingot[web]'")

from ingot.cli.main import _ACTIONS, VERBS, _verb_parser, _with_subcommands, main
from ingot.cli.terminal import Terminal
from ingot.config import to_toml
from ingot.data.build.corpus import SECONDS
from ingot.errors import UsageError
from ingot.hub.arch_config import huggingface_config
from ingot.machine.facts import read_machine
from ingot.planner.published.run import shipped_rows
from ingot.planner.request.planning import plan
from ingot.planner.request.presets import load_model
from ingot.planner.show import plans
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.compare import ComparedCheckpoint, Comparison, TensorChange

OUTPUT = ("--json", "--quiet", "--verbose")
TOPICS = ("mem", "time", "comms", "bubble", "lr", "batch", "size", "failures")

PAIRS = (Path(__file__).parent / "flags.txt").read_text()

# The exit code of a value that is refused: a shard of another size needs more tokens than a test has, NVTX a GPU.
REFUSED = {"--shard-size 4KB": 3, "--set train.micro_batch=3": 3, "--take lower": 2, "--to 1": 2, "--nvtx": 2}
MACHINE = read_machine()
PLANS: dict[str, object] = {}
# What `explain bubble` needs to explain something.
PIPELINE = (" --pp 2", " --set parallel.pp=2 --set parallel.dp_shard=1")
# What trains, serves, measures or starts a cluster: module, name.
REPLACED = (
    ("ingot.trainer.launch.train", "train"),
    ("ingot.trainer.launch.doctor", "check_fleet"),
    ("ingot.trainer.launch.deep", "inspect_deep"),
    ("ingot.trainer.launch.stored", "push_checkpoint"),
    ("ingot.trainer.launch.stored", "fetch_checkpoint"),
    ("ingot.trainer.launch.retain", "prune_checkpoints"),
    ("ingot.report.lineage.prove", "prove_run"),
    ("ingot.trainer.trained", "evaluate_trained"),
    ("ingot.trainer.background_eval.scores", "score_tasks"),
    ("ingot.trainer.trained", "sample_trained"),
    ("ingot.trainer.export.huggingface", "export_run"),
    ("ingot.trainer.convert.dcp_out", "export_dcp"),
    ("ingot.trainer.convert.imported", "import_dcp"),
    ("ingot.trainer.convert.reshard", "reshard_checkpoint"),
    ("ingot.trainer.experiments.doremi", "doremi"),
    ("ingot.trainer.experiments.ablation", "ablate"),
    ("ingot.rehearse.dryrun.dry_run", "simulate"),
    ("ingot.rehearse.profile.profile", "profile"),
    ("ingot.rehearse.replay.replay", "replay"),
    ("ingot.rehearse.replay.spike", "replay_spike"),
    ("ingot.watch.terminal.follow", "show"),
    ("ingot.planner.published.fit", "Fit"),
    ("ingot.quickstart.run", "QuickstartRun"),
    ("ingot.drill.drill", "drill"),
    ("ingot.drill.soak", "soak"),
    ("ingot.data.tasks.ray", "Ray"),
    ("ingot.data.tasks.slurm", "Slurm"),
    ("uvicorn", "Server"),
)
# Of all layouts that a proof compares; tests/unit/rehearse/proof proves the others.
PROVED = ({"dp_shard": 2, "zero": 1}, {"tp": 2, "sequence": True})


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all verbs and actions, by the words after `ingot`."""
    found = [one for verb in (*VERBS, *_ACTIONS) for one in _with_subcommands(_verb_parser(verb)[0])]
    return {one.prog.removeprefix("ingot "): one for one in found}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser, each by its last name, without those of every verb."""
    names = {action.option_strings[-1] for action in parser._actions if action.option_strings}
    return names - {"--help", *OUTPUT}


def pairs() -> list[tuple[str, str, str]]:
    """Return (command, option, added words) for each line of PAIRS."""
    found, command = [], ""
    for line in PAIRS.strip().splitlines():
        if not line.startswith(" "):
            command = line
            continue
        topics = match[0].split("|") if (match := re.search(r"TOPIC|mem[|]\S*", command)) else [""]
        for topic in TOPICS if topics == ["TOPIC"] else topics:
            more = PIPELINE["run.toml" in command] if topic == "bubble" else ""
            full = command.replace(match[0], topic) + more if match else command
            found.append((full, line.split()[0], line.strip()))
    return found


def verb_of(command: str) -> str:
    """Return the words of `command` that name its parser."""
    words = command.split()
    return next(name for n in range(len(words), 0, -1) if (name := " ".join(words[:n])) in parsers())


def invoke(line: str, folder: Path) -> tuple[int, str, str]:
    """Run `ingot LINE` in `folder`. Return its exit code, what it wrote to stdout, and what it wrote to stderr."""
    shown, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
        try:
            code = main(shlex.split(line))
        except SystemExit as stop:
            code = stop.code
    text, problem = (re.sub(rf"0x[0-9a-f]+|{folder}", "", stream.getvalue()) for stream in (shown, errors))
    return code, text, problem


def snapshot(folder: Path) -> dict[str, str]:
    """Return the hash of each file, by its path, without the file that says how long a build took."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.name != SECONDS}


def write_lines(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with a crawl, what ingot makes of it, and a run with an event log."""
    spec = importlib.util.spec_from_file_location("crawl", Path(__file__).parents[1] / "data" / "conftest.py")
    assert spec and spec.loader
    crawl = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(crawl)
    folder = tmp_path_factory.mktemp("project")
    german = "Der Hund und die Katze gehen heute nicht in den Wald, weil es regnet. " * 9
    pages = [(f"http://{host}.example/{n}", crawl.english(n), 200) for n, host in enumerate("aabb", 1)]
    pages += [("http://a.example/edited", crawl.english(8) + "\nWrite to jane@corp-site.org for the story.", 200)]
    pages += [("http://a.example/copy", crawl.english(1) + "\nThe copy of this page is on another host.", 200)]
    pages += [("http://a.example/german", german, 200), ("http://a.example/short", "too short to stay", 200)]
    crawl.write_crawl(folder / "crawl.warc.gz", pages)
    good = [{"text": crawl.english(n, 12), "body": crawl.english(n + 80, 12), "label": "good"} for n in range(20, 50)]
    law = [{"text": crawl.english(n, 12, " law"), "body": "the law", "label": "law"} for n in range(60, 90)]
    write_lines(folder / "good.jsonl", good)
    write_lines(folder / "plain.jsonl", [{"body": "law"}])
    write_lines(folder / "law.jsonl", law)
    write_lines(folder / "labeled.jsonl", [row | {"language": f"{n % 2}"} for n, row in enumerate(good + law)])
    (folder / "text.txt").write_text("the cat sat on the mat, the dog did not\n" * 40)
    (folder / "recipe.toml").write_text("[quality.gopher]\nword_count = [60, 900]\n")
    (folder / "mixture.toml").write_text('[plugins]\nmodules = ["policies"]\n')
    policy = 'MixturePolicy(name="most", weights=lambda available, settings: ({"web": 1.0}, []))'
    (folder / "policies.py").write_text(
        f"from ingot.plugins.mixture import MIXTURES, MixturePolicy\nMIXTURES.register({policy})\n"
    )
    (folder / "weights.toml").write_text("web = 0.25\nlaw = 0.75\n")
    (folder / "loads.json").write_text("[2, 1, 1, 1, 1, 1, 1, 1]")
    (folder / "twin.json").write_text(json.dumps({"kill_step": 1, "resumed_from": 1, "first_step": 1, "last_step": 2,
        "steps": 2, "equal": True, "max_difference": 0.0}))  # fmt: skip
    (folder / "dcp").mkdir()
    (folder / "dcp" / ".metadata").touch()
    (folder / "restarted").mkdir()
    restart = {"kind": "start_times", "attempt": 1, "seconds": {"kill": 0.5}, "total_seconds": 7.0}
    write_lines(folder / "restarted/events.jsonl", [restart])
    (folder / "hf").mkdir()
    config = huggingface_config(replace(load_model("tiny").arch, vocab_size=500), eot_id=0, dtype="float32")
    (folder / "hf/config.json").write_text(json.dumps(config))
    rows = [dict(row.values) for row in shipped_rows() if row.id == "tt-8b-fsdp-8-eager"]
    (folder / "rows.json").write_text(json.dumps({"rows": rows}))
    write_lines(folder / "part.jsonl", law[:3])
    for line in (
        "data build crawl.warc.gz --source law law.jsonl --out data --vocab-size 300 --runner inline",
        "data build part.jsonl --out part --vocab-size 300 --runner inline",
        "data index part --out index",
        "data classifier train labeled.jsonl --licence own --out model.bin --set epochs=1 --set buckets=100",
        "plan --model tiny --tokens data --seq 64 --steps 3 --batch 8 --micro-batch 2 --cluster h100 --out run.toml",
        "plan --model tiny-moe --tokens data --seq 64 --steps 3 --batch 8 --cluster h100 --out moe.toml",
    ):
        code, shown, errors = invoke(line, folder)
        assert code == 0, shown + errors
    listed = json.loads(invoke("data inspect data --json", folder)[1])["examples"][0]["id"]
    write_lines(folder / "list.jsonl", [{"document": listed, "reason": "by_hand", "date": "2026-11-28"}])
    shutil.copytree(folder / "data/corpus", folder / "other-corpus")
    corpus = folder / "other-corpus/corpus.json"
    corpus.write_text(corpus.read_text().replace("url.duplicate", "url.again").replace("word_count", "words"))
    tokenizer = json.loads((folder / "data/tokens/tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"content": "<stop>", "id": 300})
    (folder / "odd.json").write_text(json.dumps(tokenizer))
    run = load_run(folder / "run.toml")
    for place in ("runs/demo", "elsewhere/demo"):
        demo = RunFolder(folder / place)
        demo.root.mkdir(parents=True)
        demo.config.write_text(to_toml(replace(run, data=replace(run.data, tokens="../../data/tokens/train"))))
        step = {"kind": "step", "loss": 5.0, "grad_norm": 1.0, "lr": 0.1}
        begin = {"kind": "run_started", "from_step": 0, "world_size": 1, "parameters": 10, "device": "cpu"}
        progress = {
            "kind": "progress",
            "tokens": 512,
            "tokens_per_second": 1.0,
            "step_seconds": 0.1,
            "data_wait_seconds": 0.04,
        }
        log = [begin, step | {"step": 1}, step | {"step": 2}, *(progress | {"step": n} for n in (1, 2, 3, 4))]
        write_lines(demo.events, [{"time": 1.7e9 + n} | event for n, event in enumerate(log)])
    (folder / "runs/demo/alerts.jsonl").touch()  # none were sent
    return folder


@pytest.fixture(scope="module")
def ran(project, tmp_path_factory):
    """`ran(line)`: exit code, stdout, stderr, and the files that the command wrote or changed. Nothing runs twice."""
    before, cache = snapshot(project), {}
    document = json.loads(invoke("data inspect data --json", project)[1])["examples"][0]["id"]

    def run(line: str) -> tuple:
        if line not in cache:
            folder = tmp_path_factory.mktemp("copy") / "project"
            shutil.copytree(project, folder, copy_function=os.link)  # ingot replaces files, and changes none in place
            found = invoke(line.replace("{document}", document), folder)
            cache[line] = (*found, {n: digest for n, digest in snapshot(folder).items() if before.get(n) != digest})
            shutil.rmtree(folder)
        return cache[line]

    yield run
    assert snapshot(project) == before


def planned(*args, **kwargs):
    """Return the plan of equal arguments only once made: topics differ in what they show of it."""
    key = repr((args, sorted(kwargs.items())))
    if key not in PLANS:
        PLANS[key] = plan(*args, **kwargs)
    return PLANS[key]


def called(name: str):
    """Return a stand-in for a function that does the work: it prints its arguments and ends the program."""

    def show(*args, **kwargs):
        print(name, args, kwargs)
        sys.exit(0)

    return show


TABLES: set[str] = set()  # lines of all tables that the tests so far made commands print


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    plain, planned_table = Terminal.table, plans.table

    def table(self, *args, **kwargs):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            plain(self, *args, **kwargs)
        TABLES.update(shown.getvalue().splitlines())
        print(shown.getvalue(), end="")

    def table_of_plan(*args, **kwargs):
        found = list(planned_table(*args, **kwargs))
        TABLES.update(found)
        return iter(found)

    monkeypatch.setattr(Terminal, "table", table)
    monkeypatch.setattr(plans, "table", table_of_plan)


@pytest.fixture(autouse=True)
def nothing_trains(monkeypatch):
    for module, name in REPLACED:
        monkeypatch.setattr(f"{module}.{name}", called(name))
    config = SimpleNamespace(name="demo", evaluate=SimpleNamespace(prompts=()), train=SimpleNamespace(precision="fp32"))
    trained = SimpleNamespace(config=config, step=1, device="cpu")

    def load(*args):
        print("load_trained", args)
        return trained

    def listen(*args):
        print("listen", args)
        return SimpleNamespace(getsockname=lambda: args)

    def measure(cluster):
        print("measure", cluster)
        return cluster

    def compare(*args):
        one = ComparedCheckpoint(path="", step=1, kind="full", tokens=1, layout={}, world=1, epoch=0, health="")
        changes = [TensorChange(name=f"w{i}", shape=(1,), relative=1.0, largest=1.0) for i in range(11)]
        return Comparison(a=one, b=one, parameters=changes)

    monkeypatch.setattr("ingot.trainer.checkpoint.compare.compare_checkpoints", compare)
    monkeypatch.setattr("ingot.trainer.trained.load_trained", load)
    monkeypatch.setattr("ingot.cli.serving.listen", listen)
    monkeypatch.setattr("ingot.rehearse.calibrate.calibrate.calibrate", measure)
    monkeypatch.setattr("ingot.rehearse.proof.cases._LAYOUTS", PROVED)
    monkeypatch.setattr("secrets.token_urlsafe", lambda size: "token")
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    monkeypatch.setattr("time.time", lambda: 1.8e9)
    utc = time.gmtime
    monkeypatch.setattr("time.gmtime", lambda seconds=1.8e9: utc(seconds))
    monkeypatch.setattr("ingot.machine.facts.read_machine", lambda: MACHINE)
    monkeypatch.setattr("ingot.planner.request.planning.plan", planned)


def test_every_option_has_a_pair():
    every = {(verb, option) for verb, parser in parsers().items() for option in options_of(parser)}
    proved = {(verb_of(command), option) for command, option, _ in pairs()}
    assert sorted(every - proved) == []
    assert sorted(proved - every) == []


@pytest.mark.slow
@pytest.mark.parametrize(("command", "option", "words"), pairs(), ids=lambda one: one if one[:2] == "--" else "")
def test_an_option_changes_what_the_program_does(ran, command, option, words):
    assert option == words.split()[0]
    without, added = ran(command), ran(f"{command} {words}")
    assert without != added, without
    assert added[0] == REFUSED.get(words, 0), added


@pytest.mark.parametrize("verb", sorted(parsers()))
def test_every_verb_and_action_has_the_options_of_output(verb, tmp_path, monkeypatch):
    def run(args, terminal):
        terminal.say("a line")
        terminal.result({"a": 1})
        raise UsageError("E-TEST", "found", rule="rule", fix="fix")

    commands = [f"{command} {words}" for command, _, words in pairs()]
    commands += [line for line in PAIRS.splitlines() if not line.startswith(" ")]
    command = next((line for line in commands if f"{line} ".startswith(f"{verb} ")), verb)
    module = verb.replace(" ", "_") if verb in _ACTIONS else verb.split()[0]
    monkeypatch.setattr(f"ingot.cli.{module}.run", run)
    text, quiet, facts, traced = (
        invoke(f"{verb} {flag} {command.removeprefix(verb)}", tmp_path) for flag in ("", "-q", "--json", "-v")
    )
    assert (text[1], quiet[1], text[2]) == ("a line\n", "", quiet[2])
    assert [json.loads(line).get("a") for line in facts[1].splitlines()] == [1, None]
    assert "Traceback" in traced[2] and "Traceback" not in text[2]


@pytest.mark.slow
def test_tables_fit_80_columns(ran):
    """Tables of all commands that ran before in this file, and of these."""
    for command in ("explain", "explain E-", "data inspect data", "plan score", "check moe.toml --cluster h100"):
        ran(command)
    ran("plan --model moe-671b --tokens 15T --cluster 256x8xh100 --pp 32 --ep 8 --top 9")
    assert len(TABLES) > 200
    assert [line for line in TABLES if len(line) > 80] == []
