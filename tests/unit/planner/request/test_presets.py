"""Presets by name and file, clusters by size, and projects made from them."""

import json
import tomllib
from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.config import from_dict, to_toml
from ingot.hub.arch_config import huggingface_config
from ingot.hub.kinds import kind_of
from ingot.machine.facts import write_cluster
from ingot.planner.request.clusters import find_cluster, load_cluster, with_published_rates
from ingot.planner.request.planning import make_project, plan
from ingot.planner.request.presets import ModelPreset, choose_model, load_model, model_names, model_of_size
from ingot.planner.run.plan import write_plan
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.theory.rules import load_run


@pytest.mark.parametrize("name", model_names())
def test_every_model_preset_is_a_legal_model(name):
    preset = load_model(name)
    assert preset.about and not list(preset.arch.problems())
    assert preset.train.seq_len <= preset.arch.max_seq_len


@pytest.mark.parametrize("name", [name for name in model_names() if load_model(name).active_parameters])
def test_published_counts_of_models_with_experts_are_ours(name):
    """To the billion, or its tenth, that publishers round to; some leave the embedding out."""
    preset = load_model(name)
    counts = [count_active_parameters(preset.arch, embedding=embedding) for embedding in (True, False)]
    assert count_parameters(preset.arch) == preset.parameters
    assert min(abs(count / preset.active_parameters - 1) for count in counts) < 0.017


def test_tiny_moe_has_as_many_active_parameters_as_tiny():
    dense, sparse = load_model("tiny").arch, load_model("tiny-moe").arch
    assert count_active_parameters(sparse) == pytest.approx(count_parameters(dense), rel=0.01)
    assert count_parameters(sparse) > 2 * count_parameters(dense)


def test_the_quickstarts_models_can_be_exported():
    """The last step of the quickstart, with or without experts."""
    assert [kind_of(load_model(name).arch) for name in ("tiny", "tiny-moe")] == ["llama", "mixtral"]


def test_unknown_presets_suggest_the_nearest():
    with refused("E-MODEL-UNKNOWN", given="llama-3-8b") as caught:
        load_model("llama-3-8b")
    assert caught.value.facts["nearest"][0] == "llama3-8b"


def test_a_model_file(tmp_path):
    path = tmp_path / "mine.toml"
    for name in ("tiny", "moe-671b"):
        path.write_text(to_toml(load_model(name)))
        assert load_model(str(path)) == load_model(name)
    path.write_text(to_toml(ModelPreset(arch=load_model("tiny").arch)))
    assert load_model(str(path)).arch == load_model("tiny").arch
    path.write_text(path.read_text().replace("d_model", "dmodel"))
    with refused("E-CONFIG-SETTINGS", keys=["arch.dmodel", "arch.d_model"], meant={"arch.dmodel": ["arch.d_model"]}):
        load_model(str(path))
    path.write_text("[arch")
    with refused("E-MODEL-FORMAT", path=str(path)):
        load_model(str(path))
    with refused("E-MODEL-READ"):
        load_model(str(tmp_path / "absent.toml"))


def test_machine_files_are_found_read_and_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = Cluster(name="saved", device="cpu", memory_bytes=1 << 30, measured="2026-01-01")
    write_cluster(tmp_path / "machine.json", cluster)
    assert find_cluster(None) == find_cluster("machine.json") == find_cluster(None, tmp_path) == cluster
    (tmp_path / "machine.json").write_text('{"name": "x"}')
    with refused("E-CONFIG-SETTINGS", keys=["device", "memory_bytes"]):
        find_cluster("machine.json")
    (tmp_path / "machine.json").write_text("[1]")
    with refused("E-MACHINE-UNREADABLE", path="machine.json", found="list"):
        find_cluster("machine.json")
    with refused("E-MACHINE-MISSING", path="absent.json"):
        find_cluster("absent.json")
    (tmp_path / "machine.json").unlink()
    assert find_cluster(None).memory_bytes > 0


def test_known_gpus_get_their_published_rates_and_keep_their_memory():
    found = Cluster(name="box", device="cuda", devices_per_node=4, memory_bytes=90 << 30, device_name="NVIDIA H200")
    rated = with_published_rates(found)
    assert rated.peak_flops == load_cluster("h200").peak_flops
    assert (rated.memory_bytes, rated.devices_per_node, rated.name) == (90 << 30, 4, "box")
    unknown = Cluster(name="box", device="cuda", memory_bytes=1, device_name="Unheard Of")
    assert with_published_rates(unknown) is unknown


def test_a_project_folder_holds_a_run_file_that_loads(tmp_path):
    files = make_project(tmp_path / "mine", "tiny")
    run = load_run(tmp_path / "mine/run.toml")
    assert run.name == "mine" and run.model == load_model("tiny").arch
    assert "# " in files[0].read_text() and (tmp_path / "mine/.gitignore").exists()
    with refused("E-FILE-EXISTS"):
        make_project(tmp_path / "mine", "tiny")
    (tmp_path / "file").write_text("")
    with refused("E-FOLDER-FILE"):
        make_project(tmp_path / "file", "tiny")
    with refused("E-MODEL-UNKNOWN", given="nope"):
        make_project(tmp_path / "other", "nope")
    with refused("E-MODEL-CHOICE", given=2):
        make_project(tmp_path / "other", "tiny", tmp_path)
    assert not (tmp_path / "other").exists()


def test_a_project_starts_from_the_weights_of_a_folder(tmp_path):
    arch = replace(load_model("tiny").arch, vocab_size=500)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(huggingface_config(arch, eot_id=0, dtype="float32")))
    make_project(tmp_path / "mine", init=tmp_path / "hf")
    run = load_run(tmp_path / "mine/run.toml")
    assert (run.init, run.model.vocab_size, run.model.d_model) == ("../hf", 500, arch.d_model)


def test_a_plan_is_written_once_and_read_back(tmp_path):
    planned = plan("smollm2-135m", tokens="2B", cluster="8xh100", relative_to=tmp_path).best
    plan_file = write_plan(tmp_path / "run.toml", planned)
    assert load_run(tmp_path / "run.toml") == planned.run
    assert from_dict(Plan, json.loads(plan_file.read_text())) == planned.plan
    text = (tmp_path / "run.toml").read_text()
    assert "DeepSeek" in text and tomllib.loads(text)["train"]["steps"] == planned.run.train.steps
    with refused("E-FILE-EXISTS", path=str(tmp_path / "run.toml")):
        write_plan(tmp_path / "run.toml", planned)
    write_plan(tmp_path / "run.toml", planned, force=True)
    again = plan(run=tmp_path / "run.toml", cluster="8xh100", overrides=("train.steps=5000",), price=1.0).best
    assert again.plan.steps == 5000 and again.run.cost.usd_per_hour == 1.0


def test_tokens_are_a_folder_or_a_count(tmp_path):
    with refused("E-TOKENS-ARGUMENT", path=str(tmp_path / "absent")):
        plan("tiny", tokens=str(tmp_path / "absent"), cluster="8xh100")
    with refused("E-TOKENS-ARGUMENT", path="many"):
        plan("tiny", tokens="many", cluster="8xh100")


@pytest.mark.parametrize(
    ("parameters", "shape"),
    [(8e9, "llama3-8b"), (70e9, "llama3-70b"), (405e9, "llama3-405b"), (13e9, "usual proportions")],
)
def test_a_size_has_the_shape_of_a_preset_near_it_or_of_usual_proportions(parameters, shape):
    chosen = model_of_size(round(parameters))
    assert chosen.shape == shape and chosen.parameters == parameters
    assert count_parameters(chosen.arch) == pytest.approx(parameters, rel=0.05)
    assert not chosen.arch.is_moe


def test_a_name_keeps_its_dots_and_a_file_loses_its_suffix(tmp_path):
    assert choose_model("qwen3-0.6b").name == "qwen3-0.6b"
    (tmp_path / "mine.toml").write_text(to_toml(load_model("tiny")))
    assert choose_model(str(tmp_path / "mine.toml")).name == "mine"


def test_a_model_is_chosen_in_one_way():
    with refused("E-MODEL-CHOICE", given=2):
        choose_model("tiny", parameters=10**9)
    with refused("E-MODEL-CHOICE", given=0):
        choose_model()
    with refused("E-SHAPE-SIZE", parameters=5):
        model_of_size(5)  # no model has so few
