"""Plug-ins through `ingot data build`: the same bytes on every runner and after kills; what a change does again."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.expect import refused, reported
from tests.unit.data.conftest import english, write_crawl
from tests.unit.plugins.data_plugins import EXAMPLES, plugins  # noqa: F401

from ingot.cli.main import main
from ingot.data.build import corpus_build as build
from ingot.data.build import duplicates, process_input
from ingot.data.build.corpus import cut_files, load_corpus, read_documents
from ingot.data.build.corpus_build import build_corpus
from ingot.data.sources.input import Input
from ingot.data.tasks.local import Local
from ingot.data.tasks.ray import Ray
from ingot.data.tasks.worker import write_phase
from ingot.plugins.load import load_plugins

MAIN = "import sys; from ingot.cli.main import main; sys.exit(main())"
RECIPE = """
[filter.domain]
keep = ["b.example", "rows.example"]

[format.sqlite]
table = "pages"
"""
# The first time, a worker is killed at the third document, and the whole build at the sixth.
FAULTS = """
import os, signal
from pathlib import Path
class Faults:
    name, ran = "faults", "a test"
    def __init__(self, settings): self.seen = 0
    def __call__(self, document):
        self.seen += 1
        place, worker = os.environ.get("FAULTS"), os.getpid()
        if place and self.seen == 3 and not (mark := Path(place, "worker")).exists():
            mark.touch()
            os.kill(worker, signal.SIGKILL)
        if place and self.seen == 6 and not (mark := Path(place, "build")).exists():
            mark.touch()
            server = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
            os.kill(int(server[1]), signal.SIGKILL)
FILTERS.register(Filter(name="faults", make=Faults, after="read"))
"""


@pytest.fixture
def example(plugins):  # noqa: F811
    """A folder with both examples, two crawl files and a database of pages."""
    folder = plugins.folder
    for name in ("domain_filter", "sqlite_source"):
        shutil.copy(EXAMPLES / f"{name}.py", folder)
    for part in range(2):
        pages = [(f"http://{'ab'[n % 2]}.example/{part}-{n}", english(part * 100 + n), 200) for n in range(12)]
        write_crawl(folder / f"crawl-{part}.warc.gz", pages)
    with sqlite3.connect(folder / "rows.db") as database:
        database.execute("create table pages (text text, url text)")
        rows = [(english(500 + n), f"http://www.rows.example/{n}") for n in range(12)] + [("", None)]
        database.executemany("insert into pages values (?, ?)", rows)
    database.close()
    return plugins


def command(folder: Path, out: str, *options: str) -> list[str]:
    crawl = [str(folder / f"crawl-{part}.warc.gz") for part in range(2)]
    words = ["data", "build", *crawl, "--source", "rows", str(folder / "rows.db"), "--out", str(folder / out)]
    return [*words, "--recipe", str(folder / "recipe.toml"), "--vocab-size", "300", *options]


def snapshot(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "seconds.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_examples_through_the_command(example, capsys):
    example.recipe_file(RECIPE, "domain_filter", "sqlite_source")
    folder = example.folder
    for out, workers in (("one", "1"), ("two", "2")):
        assert main(command(folder, out, "--workers", workers, "-q")) == 0, capsys.readouterr()
    assert snapshot(folder / "one") == snapshot(folder / "two")
    manifest = load_corpus(folder / "one/corpus")
    funnel = {stage.name: stage for stage in manifest.funnel}
    assert funnel["domain"].dropped == {"domain.other": 12}
    assert (funnel["domain"].ran, funnel["substrings"].documents_out) == ("keeps 2 domains, drops 0", 24)
    assert funnel["read"].dropped == {"read.empty_body": 1}
    recorded = manifest.recipe["plugins"]
    assert recorded["modules"] == list(recorded["code"]) == ["domain_filter", "sqlite_source"]
    assert str(folder) not in json.dumps(manifest.recipe)
    capsys.readouterr()
    assert main(["data", "card", str(folder / "one"), "--out", str(folder / "card.html")]) == 0
    assert recorded["code"]["domain_filter"] in (folder / "card.html").read_text()


def test_commands_that_read_a_corpus_import_no_plugin(example, capsys):
    example.recipe_file(RECIPE, "domain_filter", "sqlite_source")
    assert main(command(example.folder, "out", "--runner", "inline", "-q")) == 0
    for name in ("domain_filter", "sqlite_source"):
        (example.folder / f"{name}.py").write_text("raise SystemExit('imported')")
    for words in (["verify"], ["inspect"], ["inspect", "--dropped-by", "domain.other"], ["index"], ["mix"]):
        assert main(["data", words[0], str(example.folder / "out"), *words[1:]]) == 0, words
    card = ["data", "card", str(example.folder / "out"), "--out", str(example.folder / "card.html")]
    assert main(card) == 0


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_build_leave_no_trace(example):
    example.write("faults", FAULTS)
    example.recipe_file(RECIPE + "[filter.faults]\n", "domain_filter", "sqlite_source", "faults")
    folder, marks = example.folder, example.folder / "marks"
    marks.mkdir()

    def run(out: str, faults: str) -> int:
        words = [sys.executable, "-c", MAIN, *command(folder, out, "--workers", "2", "-q")]
        return subprocess.run(words, env=os.environ | {"FAULTS": faults}, timeout=120).returncode

    assert run("undisturbed", "") == 0
    assert run("disturbed", str(marks)) == -signal.SIGKILL
    assert sorted(path.name for path in marks.iterdir()) == ["build", "worker"]
    assert run("disturbed", str(marks)) == 0
    assert snapshot(folder / "disturbed") == snapshot(folder / "undisturbed")


class ByCommand:
    """A runner that does tasks by the command that elements of a Slurm array run, in fresh processes."""

    def run(self, tasks, store, watch):
        phase = write_phase(tasks, store, len(tasks))
        words = [sys.executable, "-m", "ingot.data.tasks.worker", str(store.root.absolute()), phase.name, "--all"]
        subprocess.run([*words, "--workers", "2"], check=True, timeout=60, stdout=subprocess.DEVNULL)
        watch(tasks, [])


@pytest.mark.slow
def test_processes_of_other_machines_import_the_plugins(example):
    recipe = example.recipe(RECIPE, "domain_filter", "sqlite_source")
    for out, runner in (("here", None), ("there", ByCommand())):
        build_corpus(inputs_of(example.folder), example.folder / out, recipe, runner=runner)
    assert snapshot(example.folder / "here") == snapshot(example.folder / "there")


@contextlib.contextmanager
def two_nodes() -> Iterator[Ray]:
    """A runner on a Ray cluster of two nodes of this machine."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        cluster.add_node(**arguments)
        cluster.wait_for_nodes()
        with Ray(cluster.address) as runner:
            yield runner
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("runner", [lambda: Local(2), pytest.param(two_nodes, marks=pytest.mark.nightly)])
def test_workers_use_the_filter_that_the_recipe_names(example, runner):
    """The filter changes texts, drops documents and notes its process, and the bytes are those of a build here."""
    marks = example.folder / "marks"
    marks.mkdir()
    example.write(
        "changes",
        f"""
        import os
        from pathlib import Path
        class Changes(Stage):
            def look(self, document):
                Path({str(marks)!r}, str(os.getpid())).touch()
                document.text += "\\nThe end."
                return Drop("odd", "odd.three", "") if document.url.endswith("3") else None
        FILTERS.register(Filter(name="odd", make=Changes, rules=("odd.three",)))
        """,
    )
    recipe = example.recipe("[filter.odd]\n", "changes")
    crawl = inputs_of(example.folder)[:2]
    build_corpus(crawl, example.folder / "here", recipe)
    assert [int(path.name) for path in marks.iterdir()] == [os.getpid()]
    with runner() as there:
        built = build_corpus(crawl, example.folder / "there", recipe, runner=there)
    assert len(list(marks.iterdir())) > 1  # other processes than this one called it
    assert {stage.name: stage.dropped for stage in built.funnel}["odd"] == {"odd.three": 2}
    assert built.recipe["plugins"]["code"] == load_plugins(["changes"], example.folder)
    assert snapshot(example.folder / "there") == snapshot(example.folder / "here")

    without = example.recipe("[filter.odd]\nenabled = false\n", "changes")
    plain = build_corpus(crawl, example.folder / "plain", without)
    assert plain.funnel[-1].documents_out == built.funnel[-1].documents_out + 2 and "plugins" not in plain.recipe
    texts = [document["text"] for _, document in read_documents(example.folder / "there")]
    assert texts and all(text.endswith("The end.") for text in texts)
    assert not any("The end." in document["text"] for _, document in read_documents(example.folder / "plain"))


def inputs_of(folder: Path) -> list[Input]:
    web = [Input(location=str(folder / f"crawl-{part}.warc.gz")) for part in range(2)]
    return [*web, Input(location=str(folder / "rows.db"), source="rows")]


@pytest.fixture
def processed(monkeypatch):
    """A list of the inputs that each call of a build reads; every build is stopped after that."""
    found, real = [], build.run_all

    def stop(tasks, store, *rest):
        if tasks[0].function is duplicates.find_same_urls:
            raise KeyboardInterrupt
        if tasks[0].function is process_input.process_input:
            found.append([task.label for task in tasks if not store.finished(task)])
        return real(tasks, store, *rest)

    monkeypatch.setattr(build, "run_all", stop)
    return found


def test_a_changed_plugin_does_exactly_its_tasks_again(example, processed):
    def read_again(*changed: str) -> list[str]:
        for name in changed:
            path = example.folder / f"{name}.py"
            path.write_text(path.read_text() + "\n# changed\n")
        recipe = example.recipe(text, "domain_filter", "sqlite_source", "policy")
        with pytest.raises(KeyboardInterrupt):
            build_corpus(inputs_of(example.folder), example.folder / "corpus", recipe)
        return processed[-1]

    example.write("policy", 'MIXTURES.register(MixturePolicy(name="mine", weights=lambda a, s: ({}, [])))')
    text = '[source.web.filter.domain]\nkeep = ["b.example"]\n[format.sqlite]\ntable = "pages"\n'
    crawl = ["crawl-0.warc.gz", "crawl-1.warc.gz"]
    assert read_again() == [*crawl, "rows.db"]
    assert read_again() == []
    assert read_again("sqlite_source") == ["rows.db"]
    assert read_again("domain_filter") == crawl
    assert read_again("policy") == []
    assert read_again("domain_filter", "sqlite_source") == [*crawl, "rows.db"]


def test_another_code_is_another_corpus(example, capsys):
    """A folder made with other code of a plug-in is treated like one that was made by another recipe."""
    example.recipe_file(RECIPE, "domain_filter", "sqlite_source")
    words = command(example.folder, "out", "--runner", "inline", "--json")
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["fresh"]
    assert main(words) == 0
    assert not json.loads(capsys.readouterr().out)["fresh"]
    path = example.folder / "domain_filter.py"
    path.write_text(path.read_text().replace('document.notes["domain"] = host', "pass"))
    assert main(words) == 3
    reported(capsys.readouterr().out, "E-TOKENS-FINISHED")
    assert main([*words[:-1], "--set", "dedup.enabled=false", "--json"]) == 3
    reported(capsys.readouterr().out, "E-TOKENS-FINISHED")


def test_code_that_changes_during_a_build_ends_it(example, monkeypatch):
    recipe = example.recipe(RECIPE, "domain_filter", "sqlite_source")
    real = build.run_all

    def edit(tasks, *rest):
        if tasks[0].function is process_input.process_input:
            path = example.folder / "domain_filter.py"
            path.write_text(path.read_text() + "\n# changed\n")
        return real(tasks, *rest)

    monkeypatch.setattr(build, "run_all", edit)
    with refused("E-DATA-PLUGIN-CHANGED", module="domain_filter"):
        build_corpus(inputs_of(example.folder), example.folder / "corpus", recipe)


def test_documents_on_which_a_plugin_raised_are_reported(example, capsys):
    example.write(
        "raises",
        """
        class Raises(Stage):
            def look(self, document):
                if document.url.endswith(("3", "5")):
                    raise ValueError("three or five")
        FILTERS.register(Filter(name="odd", make=Raises))
        """,
    )
    example.recipe_file(RECIPE + "[filter.odd]\n", "domain_filter", "sqlite_source", "raises")
    assert main(command(example.folder, "out", "--workers", "2", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert {stage["name"]: stage["dropped"] for stage in found["corpus"]["funnel"]}["odd"] == {"odd.plugin": 6}
    (warning,) = found["warnings"]
    assert "6 documents" in warning and "ValueError: three or five (raises.py:" in warning
    assert cut_files(example.folder / "out/corpus") == (warning,)


def test_a_plugin_that_always_raises_ends_the_command(example, capsys):
    example.write("raises", "FILTERS.register(Filter(name='odd', make=lambda settings: Odd(settings)))\n"
                            "class Odd(Stage):\n    def look(self, document): return document.nothing\n")  # fmt: skip
    example.recipe_file("[filter.odd]\n", "raises")
    pages = [(f"http://c.example/{n}", english(n), 200) for n in range(30)]
    crawl = write_crawl(example.folder / "many.warc.gz", pages)
    words = ["data", "build", str(crawl), "--out", str(example.folder / "out"), "--workers", "2", "--json"]
    assert main([*words, "--recipe", str(example.folder / "recipe.toml")]) == 20
    error = reported(capsys.readouterr().out, "E-DATA-PLUGIN-RAISED", part="filter 'odd' of plug-in raises")
    assert error["facts"]["file"].endswith("raises.py") and error["facts"]["line"]


def test_a_format_that_yields_nonsense_ends_the_command(example, capsys):
    example.write("nonsense", "FORMATS.register(InputFormat(name='odd', read=lambda *given: [1], endings=('odd',)))")
    example.recipe_file("", "nonsense")
    (example.folder / "a.odd").write_bytes(b"")
    words = ["data", "build", str(example.folder / "a.odd"), "--out", str(example.folder / "out"), "--json"]
    assert main([*words, "--recipe", str(example.folder / "recipe.toml"), "--runner", "inline"]) == 3
    reported(capsys.readouterr().out, "E-DATA-PLUGIN-RESULT", part="format 'odd' of plug-in nonsense")


def test_the_recipe_is_printed_with_its_plugins(example, capsys, tmp_path):
    path = example.recipe_file(RECIPE, "domain_filter", "sqlite_source")
    assert main(["data", "recipe", "--recipe", str(path)]) == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    assert main(["data", "recipe", "--recipe", str(printed)]) == 0
    assert capsys.readouterr().out == printed.read_text()
    assert (
        "[format.sqlite]" in printed.read_text() and "code" not in printed.read_text().partition("[plugins]")[2][:200]
    )
