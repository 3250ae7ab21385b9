"""A written folder is what transformers computes too, and a folder that ingot does not compute exactly is refused."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ingot.errors import CheckpointError, ConfigError, UsageError
from ingot.export.arch_config import arch_of, huggingface_config
from ingot.export.model_folder import import_huggingface, write_model
from ingot.export.naming import huggingface_names, parameter_shapes
from ingot.model.transformer import Transformer
from ingot.schema.arch import Arch

LLAMA = Arch(
    vocab_size=97,
    d_model=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ffn=80,
    max_seq_len=64,
    rope_theta=5_000.0,
    norm_eps=1e-6,
)
QWEN = replace(LLAMA, qk_norm=True, tied_embeddings=False, head_dim=20)
SHAPES = {"llama-tied": LLAMA, "llama-untied": replace(LLAMA, tied_embeddings=False), "qwen3": QWEN,
          "qwen3-tied": replace(QWEN, tied_embeddings=True)}  # fmt: skip


def random_model(arch: Arch) -> Transformer:
    """Weights far from their initial values, norms included, so that a swapped name shows."""
    torch.manual_seed(5)
    model = Transformer(arch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


def write(folder, model: Transformer, **options):
    folder.mkdir(exist_ok=True)
    write_model(folder, model.arch, model.state_dict(), eot_id=0, **options)
    return folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "ABSENT"}))


@pytest.fixture
def tokens_BT():
    return torch.arange(80).mul(31).remainder(97).view(2, 40)


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes_are_those_of_the_model(name):
    model = Transformer(SHAPES[name])
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(SHAPES[name])
    assert len(set(huggingface_names(SHAPES[name]).values())) == len(parameter_shapes(SHAPES[name]))


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_computes_the_same_logits(name, tmp_path, tokens_BT):
    transformers = pytest.importorskip("transformers")
    model = random_model(SHAPES[name])
    folder = write(tmp_path / "hf", model)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        difference = (theirs.eval()(tokens_BT).logits - model(tokens_BT)).abs().max().item()
    assert difference <= 1e-5
    assert theirs.num_parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_saved_by_transformers_is_imported(name, tmp_path, tokens_BT):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(write(tmp_path / "a", random_model(SHAPES[name])))
    theirs.save_pretrained(tmp_path / "b")
    arch, state = import_huggingface(tmp_path / "b")
    assert arch == SHAPES[name]
    ours = Transformer(arch)
    ours.load_state_dict(state)
    with torch.no_grad():
        assert (theirs.eval()(tokens_BT).logits - ours(tokens_BT)).abs().max().item() <= 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_round_trip_keeps_every_bit_and_shards_by_size(name, tmp_path):
    model = random_model(SHAPES[name])
    for folder, limit in (("whole", 10**9), ("sharded", 40_000)):
        arch, state = import_huggingface(write(tmp_path / folder, model, max_file_bytes=limit))
        assert arch == SHAPES[name]
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, model.state_dict()[n]) for n, tensor in state.items())
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) > 2
    assert all(f.stat().st_size < 45_000 for f in files)
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())


def test_weights_can_be_read_by_whoever_reads_the_config(tmp_path):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_bfloat16_is_stored_as_bfloat16(tmp_path):
    model = random_model(LLAMA)
    _, state = import_huggingface(write(tmp_path / "hf", model, dtype="bfloat16"))
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    assert torch.equal(state["embed.weight"], model.embed.weight.bfloat16())
    with pytest.raises(UsageError, match="float8"):
        write(tmp_path / "other", model, dtype="float8")


def test_config_of_transformers_4_is_read(tmp_path):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    edit_config(folder, rope_parameters="ABSENT", dtype="ABSENT", rope_scaling=None)
    assert import_huggingface(folder)[0] == LLAMA


def test_absent_keys_mean_what_transformers_assumes(tmp_path):
    folder = write(tmp_path / "hf", random_model(replace(LLAMA, num_kv_heads=4, head_dim=12, tied_embeddings=False)))
    edit_config(folder, num_key_value_heads="ABSENT", head_dim="ABSENT", tie_word_embeddings="ABSENT",
                rope_theta="ABSENT", rope_parameters="ABSENT", rms_norm_eps="ABSENT",
                max_position_embeddings="ABSENT")  # fmt: skip
    arch, _ = import_huggingface(folder)
    assert (arch.num_kv_heads, arch.head_dim, arch.tied_embeddings) == (4, 12, False)
    assert (arch.rope_theta, arch.norm_eps, arch.max_seq_len) == (10_000.0, 1e-6, 2048)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_parameters": None}, "llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": None}, "linear"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": 3}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "auto_map"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "mistral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"vocab_size": "ABSENT"}, "vocab_size"),
    ],
)
def test_what_ingot_does_not_compute_is_refused(tmp_path, change, said):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    edit_config(folder, **change)
    with pytest.raises(ConfigError, match=said):
        import_huggingface(folder)


def test_all_config_problems_come_at_once(tmp_path):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    edit_config(folder, attention_bias=True, hidden_act="gelu", rope_parameters={"rope_type": "yarn"})
    with pytest.raises(ConfigError) as caught:
        import_huggingface(folder)
    assert all(word in str(caught.value) for word in ("attention_bias", "gelu", "yarn"))


@pytest.mark.parametrize("text", ["", "[1]", "{", "nul\0", "[" * 100_000, '{"model_type": []}'])
def test_garbage_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        import_huggingface(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


KEYS = [*huggingface_config(QWEN, eot_id=0, dtype="float32"), "rope_scaling", "layer_types", "quantization_config"]


@given(st.sampled_from(KEYS), json_values)
def test_any_value_of_any_key_is_read_or_refused(key, value):
    config = huggingface_config(QWEN, eot_id=0, dtype="float32") | {key: value}
    try:
        assert isinstance(arch_of(config, "config.json"), Arch)
    except ConfigError as error:
        assert "config.json" in str(error)


def test_pickled_weights_are_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was opened",))

    folder = write(tmp_path / "hf", random_model(LLAMA))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
        import_huggingface(folder)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.update({"model.norm.bias": torch.zeros(48)}), r"model\.norm\.bias"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(49)}), r"\[49\].*\[48\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int64)}), "I64"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(97, 48)}), "tied"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, said):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=said):
        import_huggingface(folder)


def test_a_copy_of_the_tied_head_is_accepted(tmp_path):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    _, state = import_huggingface(folder)
    assert "head.weight" not in state


def test_damaged_files_are_refused(tmp_path):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], b"\xff" * 200, (1 << 60).to_bytes(8, "little") + whole[8:]):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            import_huggingface(folder)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "../outside.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "model.bin"},
        {"a": "absent.safetensors"},
        {"a": 7},
        [],
    ],
)
def test_an_index_cannot_leave_its_folder(tmp_path, weight_map):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError):
        import_huggingface(folder)


def test_state_of_another_architecture_is_not_written(tmp_path):
    state = random_model(LLAMA).state_dict()
    state.pop("norm.weight")
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        write_model(tmp_path, LLAMA, state, eot_id=0)
    with pytest.raises(ConfigError, match="multiple"):
        write_model(
            tmp_path, replace(LLAMA, d_model=50), random_model(replace(LLAMA, d_model=50)).state_dict(), eot_id=0
        )
