"""Presets by name and file, clusters by size, and projects made from them."""

import json
import tomllib

import pytest

from ingot.config import from_dict, load, to_toml
from ingot.errors import ConfigError, DataMissing, UsageError
from ingot.hub.kinds import kind_of
from ingot.machine.cluster_file import write_cluster
from ingot.planner.request.clusters import find_cluster, load_cluster, with_published_rates
from ingot.planner.request.planning import plan
from ingot.planner.request.presets import ModelPreset, load_model, model_names
from ingot.planner.request.project import make_project, plan_file, write_plan
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.theory.params import count_active_parameters, count_parameters


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


def test_a_token_of_tiny_moe_meets_as_much_as_one_of_tiny():
    dense, sparse = load_model("tiny").arch, load_model("tiny-moe").arch
    assert count_active_parameters(sparse) == pytest.approx(count_parameters(dense), rel=0.01)
    assert count_parameters(sparse) > 2 * count_parameters(dense)


def test_the_quickstarts_models_can_be_exported():
    """The last step of the quickstart, with or without experts."""
    assert [kind_of(load_model(name).arch) for name in ("tiny", "tiny-moe")] == ["llama", "mixtral"]


def test_unknown_presets_suggest_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'llama3-8b'"):
        load_model("llama-3-8b")


def test_a_model_file(tmp_path):
    path = tmp_path / "mine.toml"
    for name in ("tiny", "moe-671b"):
        path.write_text(to_toml(load_model(name)))
        assert load_model(str(path)) == load_model(name)
    path.write_text(to_toml(ModelPreset(arch=load_model("tiny").arch)))
    assert load_model(str(path)).arch == load_model("tiny").arch
    path.write_text(path.read_text().replace("d_model", "dmodel"))
    with pytest.raises(ConfigError, match=r"did you mean .arch\.d_model."):
        load_model(str(path))
    path.write_text("[arch")
    with pytest.raises(ConfigError, match="is TOML"):
        load_model(str(path))
    with pytest.raises(UsageError, match="cannot read"):
        load_model(str(tmp_path / "absent.toml"))


def test_machine_files_are_found_read_and_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = Cluster(name="saved", device="cpu", memory_bytes=1 << 30, measured="2026-01-01")
    write_cluster(tmp_path / "machine.json", cluster)
    assert find_cluster(None) == find_cluster("machine.json") == find_cluster(None, tmp_path) == cluster
    (tmp_path / "machine.json").write_text('{"name": "x"}')
    with pytest.raises(ConfigError, match="missing key 'device'"):
        find_cluster("machine.json")
    (tmp_path / "machine.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no object"):
        find_cluster("machine.json")
    with pytest.raises(ConfigError, match="no machine file"):
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
    run = load(RunConfig, tmp_path / "mine/run.toml")
    assert run.name == "mine" and run.model == load_model("tiny").arch
    assert "# " in files[0].read_text() and (tmp_path / "mine/.gitignore").exists()
    with pytest.raises(UsageError, match="exists"):
        make_project(tmp_path / "mine", "tiny")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        make_project(tmp_path / "file", "tiny")
    with pytest.raises(UsageError, match="no model preset"):
        make_project(tmp_path / "other", "nope")
    assert not (tmp_path / "other").exists()


def test_a_plan_is_written_once_and_read_back(tmp_path):
    planned = plan("smollm2-135m", tokens="2B", cluster="8xh100", beside=tmp_path).best
    beside = write_plan(tmp_path / "run.toml", planned)
    assert load(RunConfig, tmp_path / "run.toml") == planned.run
    assert from_dict(Plan, json.loads(beside.read_text())) == planned.plan
    text = (tmp_path / "run.toml").read_text()
    assert "DeepSeek" in text and tomllib.loads(text)["train"]["steps"] == planned.run.train.steps
    with pytest.raises(UsageError, match="exists"):
        write_plan(tmp_path / "run.toml", planned)
    write_plan(tmp_path / "run.toml", planned, force=True)
    again = plan_file(tmp_path / "run.toml", load_cluster("8xh100"), ("train.steps=5000",), usd_per_hour=1.0)
    assert again.plan.steps == 5000 and again.run.cost.usd_per_hour == 1.0


def test_tokens_are_a_folder_or_a_count(tmp_path):
    with pytest.raises(DataMissing, match="no such folder"):
        plan("tiny", tokens=str(tmp_path / "absent"), cluster="8xh100")
    with pytest.raises(DataMissing, match="not a count"):
        plan("tiny", tokens="many", cluster="8xh100")
