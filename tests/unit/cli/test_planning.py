"""The verbs of planning from a user's view: doctor, init, plan, check."""

import json
from dataclasses import replace

import pytest
from tests.expect import named, reported

from ingot.cli.main import main
from ingot.hub.arch_config import huggingface_config
from ingot.planner.request.presets import load_model
from ingot.schema.arch import Moe
from ingot.theory.rules import load_run


def out(capsys):
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_init_plan_check(capsys, tmp_path):
    assert main(["init", "demo"]) == 0
    assert "created demo/run.toml" in out(capsys)
    assert main(["plan", "--run", "demo/run.toml"]) == 0
    text = out(capsys)
    assert "880 x 2,048 tokens" in text
    assert main(["check", "demo/run.toml"]) == 3
    text = out(capsys)
    assert "ingot data build" in text and "Nothing was started" in text and "errors" in text
    assert main(["check", "demo/run.toml", "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert (facts["error"], facts["exit_code"]) == ("E-CHECK-FAILED", 3) and facts["findings"]


def test_one_more_line_and_the_plan_is_of_experts(capsys):
    assert main(["init", "demo"]) == 0
    experts = ["--set", "model.moe={num_experts=8, top_k=2, d_expert=172, bias_rate=1e-3}"]
    ranks = ["--set", "parallel.dp_shard=4", "--set", "parallel.ep=4", "--set", "train.micro_batch=1"]
    command = ["demo/run.toml", *experts, *ranks]
    capsys.readouterr()
    assert main(["plan", "--run", *command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"]["parameters"] > 2 * facts["plan"]["active_parameters"] > 10**6
    assert main(["plan", "--run", *command]) == 0
    assert "2.84M parameters, 1.25M active; 2 on each of 4 ranks" in out(capsys)
    assert main(["check", *command]) == 3  # there is no data
    text = out(capsys)
    assert "experts   8 experts, 2 per token" in text and all(len(line) <= 120 for line in text.splitlines()[-4:])
    assert main(["check", *command, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["notes"]["experts"].startswith("8 experts")
    assert main(["check", *command, "--set", "parallel.ep=3"]) == 3
    text = out(capsys)
    assert "--set parallel.ep: 3 does not divide model.moe.num_experts=8; nearest: 2 or 4" in text
    assert "8 experts, 2 to a token" not in text  # no note on a broken layout


def test_a_written_plan_names_the_form_of_context_parallelism(capsys, tmp_path):
    assert main(["init", "demo"]) == 0
    command = ["plan", "--run", "demo/run.toml", "--set", "parallel.cp=2", "--cluster", "8xh100"]
    assert main([*command, "--out", "planned.toml"]) == 0
    assert "context   " in out(capsys)
    text = (tmp_path / "planned.toml").read_text()
    assert 'context = "auto"' not in text and "adds the least time to a layer on 8xh100" in text
    assert main(["plan", "--run", "planned.toml", "--cluster", "8xh100"]) == 0
    assert main([*command, "--set", "train.seq_len=255", "--set", "parallel.context=ring"]) == 3
    assert "nearest: 252 or 256" in out(capsys)


def write_manifest(folder, vocab_size=512):
    shard = {"name": "web-0", "source": "web", "tokens": 9000, "documents": 1, "text_bytes": 36_000}
    shard |= {"blocks_sha256": "b", "documents_sha256": "d"}
    manifest = {"dtype": "uint16", "vocab_size": vocab_size, "eot_id": 0, "tokenizer_sha256": "t", "corpus_sha256": "c"}
    manifest |= {"split": "train", "block_bytes": 1 << 20, "seed": 1, "shards": [shard]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("folder", ["data", "data/tokens", "data/tokens/train"])
def test_a_plan_takes_the_build_folder_and_the_folders_in_it(capsys, tmp_path, folder):
    write_manifest(tmp_path / "data/tokens/train")
    assert main(["plan", "--model", "tiny", "--tokens", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["data"]["tokens"] == "data/tokens/train"


def test_a_model_from_elsewhere_is_planned_and_checked(capsys, tmp_path):
    arch = load_model("tiny-moe").arch
    config = huggingface_config(
        replace(arch, moe=Moe(num_experts=8, top_k=2, d_expert=arch.d_ffn)), eot_id=0, dtype="float32"
    )
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    command = ["plan", "--init", "hf", "--tokens", "1.3M", "--cluster", "8xh100", "--seq", "64"]
    assert main([*command, "--out", "runs/moe.toml"]) == 0
    planned = load_run(tmp_path / "runs/moe.toml")
    assert planned.init == "../hf" and planned.name == "hf"
    assert planned.model.vocab_size == arch.vocab_size and planned.model.moe.num_experts == 8
    capsys.readouterr()
    check = ["check", "runs/moe.toml", "--cluster", "8xh100"]
    main(check)
    assert "init" not in out(capsys)
    assert main([*check, "--set", "model.moe.top_k=3"]) == 3
    assert "runs/moe.toml:3: init: the model in runs/../hf differs from the run's: " in out(capsys)
    assert main([*check, "--set", "init=nowhere"]) == 0  # it may exist on the cluster
    assert "--set init: there is no folder runs/nowhere" in out(capsys)
    assert main([*command[:-1], str(arch.max_seq_len * 2)]) == 3
    assert "model.max_seq_len" in out(capsys)


def test_a_model_from_elsewhere_keeps_its_vocabulary(capsys, tmp_path):
    arch = load_model("tiny").arch
    (tmp_path / "hf").mkdir()
    config = huggingface_config(replace(arch, vocab_size=500), eot_id=0, dtype="float32")
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    write_manifest(tmp_path / "data/tokens/train", vocab_size=512)
    assert main(["plan", "--init", "hf", "--tokens", "data"]) == 3
    assert "512" in out(capsys)
    write_manifest(tmp_path / "data/tokens/train", vocab_size=400)
    assert main(["plan", "--init", "hf", "--tokens", "data", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["model"]["vocab_size"] == 500


def test_missing_tokens_exit_3_and_damaged_ones_20(capsys, tmp_path):
    command = ["plan", "--model", "tiny", "--tokens", "data"]
    (tmp_path / "data").mkdir()
    assert main(command) == 3
    (tmp_path / "data/web-0.tokens").write_bytes(b"1234")
    assert main(command) == 20


def test_a_large_plan_needs_no_machine_of_that_size(capsys):
    command = ["plan", "--model", "llama3-8b", "--tokens", "1.5T", "--cluster", "16x8xh100", "--explain", "all"]
    assert main(command) == 0
    text = out(capsys)
    assert "8.03B parameters" in text and "MFU" in text and "$" in text and "memory.activations" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_a_plan_that_does_not_fit_is_shown_and_exits_3(capsys):
    command = ["plan", "--model", "smollm2-360m", "--tokens", "1B", "--cluster", "h100"]
    command += ["--assume", "memory_bytes=3GiB"]
    assert main(command) == 3
    text = out(capsys)
    assert "does not fit" in text and "--cluster" in text and "--out run.toml" not in text and "\nfix  " in text
    assert main([*command, "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["exit_code"] == 3 and facts["plan"]["parameters"] > 3e8 and facts["search"]["fix"]


def test_ways_out_repeat_what_was_asked(capsys):
    assert (
        main(["plan", "--budget", "1e21 flop", "--cluster", "l4", "--batch", "8", "--assume", "memory_bytes=2GB"]) == 3
    )
    text = out(capsys)
    assert "ingot plan --budget '1e21 flop' --cluster NAME" in text and "None" not in text


def test_a_bare_size_is_planned_with_what_is_known_better(capsys):
    command = ["plan", "--params", "8b", "--tokens", "100B", "--cluster", "8xh100", "--tp", "1", "--micro-batch", "1"]
    assert main([*command, "--mfu", "50%", "--price", "2", "--failures", "1%", "--top", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    plan = facts["plan"]
    assert plan["mfu"] == pytest.approx(0.5) and plan["flops_per_token"] == 6 * 8e9 and len(facts["layouts"]) == 1
    assert plan["outlook"]["failures_per_node_day"] == 0.01
    days = 6 * 8e9 * 100e9 / (8 * 989e12 * 0.5) / 86400
    assert plan["usd"] == pytest.approx(days * 24 * 8 * 2, rel=1e-3)


def test_the_recipe_is_told_in_order(capsys):
    command = ["plan", "--model", "smollm2-135m", "--tokens", "2B", "--cluster", "8xh100", "--explain"]
    assert main(command) == 0
    text = out(capsys)
    titles = [
        "the bill", "tensor parallel", "pipeline across", "data parallel", "recompute", "global batch", "the score",
        "dense or experts",
    ]  # fmt: skip
    places = [text.index(f". {title}") for title in titles]
    assert places == sorted(places) and text.count("runner-up:") >= 5
    assert main([*command[:-1], "--explain", "weather", "--json"]) == 2
    reported(capsys.readouterr().out, "E-TOPIC-UNKNOWN", topic="weather")


def test_memory_is_another_word_for_mem(capsys):
    assert main(["plan", "--model", "tiny", "--tokens", "1M", "--explain", "memory"]) == 0
    assert "memory.activations" in out(capsys)


def test_a_plan_under_json_is_one_object(capsys):
    assert main(["plan", "--model", "tiny", "--tokens", "1.3M", "--json", "--out", "run.toml"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"]["parameters"] > 10**6 and facts["run"]["train"]["steps"] > 0


@pytest.mark.parametrize(
    ("command", "exit_code", "code", "facts"),
    [
        ("plan", 2, "E-PLAN-SUBJECT", {}),
        ("plan --model tiny --init hf --tokens 1M", 2, "E-PLAN-SUBJECT", {}),
        ("plan --init hf", 2, "E-PLAN-NO-TOKENS", {}),
        ("plan --init hf --tokens 1M", 3, "E-HF-FOLDER", {"folder": "hf"}),
        ("plan --model tiny", 2, "E-PLAN-NO-TOKENS", {}),
        ("plan --model tyni --tokens 1M", 2, "E-MODEL-UNKNOWN", {"given": "tyni", "nearest": ["tiny"]}),
        ("plan --model tiny --tokens 1M --cluster 8xh10", 2, "E-DEVICE-UNKNOWN", {"given": "h10", "fix": "h100"}),
        ("plan --model tiny --tokens 1M --steps -1", 2, "E-OPTION-RANGE", {"option": "steps", "value": -1}),
        ("plan --model tiny --tokens 1M --batch 0", 2, "E-OPTION-RANGE", {"option": "batch", "value": 0}),
        ("plan --model tiny --tokens 1M --steps 0", 2, "E-OPTION-RANGE", {"option": "steps", "value": 0}),
        ("plan --model tiny --tokens 1M --lr nan", 2, "E-OPTION-RANGE", {"option": "lr"}),
        ("plan --model tiny --tokens 1M --force", 2, "E-FORCE-NO-OUT", {}),
        ("plan --model tiny --tokens nowhere", 3, "E-TOKENS-ARGUMENT", {"path": "nowhere"}),
        ("plan --model tiny --tokens ./nowhere", 3, "E-TOKENS-ARGUMENT", {"path": "./nowhere"}),
        ("plan --model tiny --tokens 0", 2, "E-OPTION-RANGE", {"option": "--tokens", "value": "0"}),
        ("plan --run absent.toml", 3, "E-CONFIG-MISSING", {"path": "absent.toml"}),
        ("plan --run absent.toml --tp 2", 2, "E-RUN-AND-OPTION", {"options": ["--tp"]}),
        ("plan --params 70GB --tokens 1T", 2, "E-COUNT-BYTES", {"option": "--params"}),
        ("plan --params 8b --tokens 1TB", 2, "E-COUNT-BYTES", {"option": "--tokens", "fix": "--tokens 1T"}),
        ("plan --params 8b --budget 2M --cluster 8xh100", 2, "E-BUDGET-FORMAT", {"budget": "2M"}),
        ("plan --params 8b --budget M --cluster 8xh100", 2, "E-BUDGET-FORMAT", {"budget": "M"}),
        ("plan --params 8b --budget 0h --cluster 8xh100", 2, "E-OPTION-RANGE", {"option": "--budget", "value": "0h"}),
        ("plan --params 8b --tokens 1T --mfu 45", 2, "E-OPTION-RANGE", {"option": "--mfu", "fix": "--mfu 45%"}),
        ("plan --params 8b --tokens 1T --price nan", 2, "E-OPTION-RANGE", {"option": "--price", "value": "nan"}),
        ("plan --params 8b --tokens 1T --cluster 8xh100 --tp 3", 3, "E-PIN-DEVICES", {"product": 3, "fix": "2 or 4"}),
        ("plan --params 8b --tokens 1T --cluster 8xh100 --pin tp", 2, "E-PIN-FORM", {"fix": "--pin tp=8"}),
        ("plan --params 8b --tokens 1T --top 0", 2, "E-OPTION-RANGE", {"option": "top", "value": 0}),
        ("plan --params 8b --tokens 1T --set a=1", 2, "E-SET-NO-RUN", {}),
        ("plan --run absent.toml --steps 3", 2, "E-RUN-AND-OPTION", {"options": ["--steps"]}),
        ("init demo --model tinny", 2, "E-MODEL-UNKNOWN", {"given": "tinny", "nearest": ["tiny", "tiny-moe"]}),
        ("doctor --ranks -1", 2, "E-OPTION-RANGE", {"option": "ranks", "value": -1}),
        ("status absent", 2, "E-RUN-FOLDER", {"run": "absent"}),
    ],
)
def test_mistakes_are_named_with_the_way_out(capsys, command, exit_code, code, facts):
    """fix: what the way out contains, a flag or a value."""
    facts = dict(facts)
    fix = facts.pop("fix", "")
    assert main([*command.split(), "--json"]) == exit_code
    error = reported(capsys.readouterr().out, code, **facts)
    assert error["fix"] and fix in error["fix"]


def test_a_check_of_no_file_names_it(capsys):
    assert main(["check", "absent.toml", "--json"]) == 3
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert named([finding["message"]], "absent.toml") and finding["fix"]


@pytest.mark.parametrize(
    ("command", "says"),
    [("plan --params 8b --tokens 1T --fp8 e4m3", "rowwise"), ("doctor --bnech", "--bench")],
)
def test_mistakes_that_the_parser_finds_name_what_may_be_meant(capsys, command, says):
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_a_written_plan_is_not_overwritten(capsys):
    command = ["plan", "--model", "tiny", "--tokens", "1.3M", "--out", "run.toml"]
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--json"]) == 2
    reported(capsys.readouterr().out, "E-FILE-EXISTS", path="run.toml")


def test_doctor_without_torch_offers_what_runs_without_it(capsys, monkeypatch):
    monkeypatch.setattr("ingot.machine.doctor._version", lambda package: None if package == "torch" else "9.9")
    assert main(["doctor"]) == 0
    following = out(capsys).partition("Next:")[2]
    assert "ingot[train]" in following
    commands = [line.split()[:2] for line in following.splitlines() if line.split()[:1] == ["ingot"]]
    assert ["ingot", "plan"] in commands and ["ingot", "data"] in commands
    assert not {"quickstart", "train", "doctor"} & {verb for _, verb in commands}


def test_doctor_prints_every_check(capsys):
    assert main(["doctor"]) == 0
    text = out(capsys)
    assert "python" in text and "memory" in text and "Next:" in text
    assert all(len(line) <= 80 for line in text.splitlines() if not line.lstrip().startswith("fix:"))
    assert main(["doctor", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["checks"]) >= 12
