"""A written folder is what transformers computes too, and a folder that ingot does not compute exactly is refused."""

import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.expect import named, refused

from ingot.errors import CheckpointError, ConfigError
from ingot.hub.arch_config import arch_of, huggingface_config
from ingot.hub.kinds import huggingface_names
from ingot.schema.arch import Arch, Mla, Moe
from ingot.trainer.export.model_folder import huggingface_shapes, import_huggingface, tensor_shapes, write_model
from ingot.trainer.model.transformer import Transformer

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
MIXTRAL = replace(LLAMA, d_ffn=24, moe=Moe(num_experts=4, top_k=2, d_expert=24))
QWEN_MOE = replace(QWEN, moe=Moe(num_experts=6, top_k=3, d_expert=24, normalize=False))
DEEPSEEK = replace(
    LLAMA,
    num_kv_heads=4,
    head_dim=20,
    mla=Mla(q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, v_dim=10),
    moe=Moe(num_experts=8, top_k=4, d_expert=24, shared_experts=2, first_dense=1, scores="sigmoid", scale=2.5,
            groups=4, top_groups=2, bias_rate=0.001),
)  # fmt: skip
SHAPES = {
    "llama-tied": LLAMA,
    "llama-untied": replace(LLAMA, tied_embeddings=False),
    "mistral": replace(LLAMA, sliding_window=7),
    "mistral-odd-width": replace(LLAMA, d_model=50),
    "qwen3": QWEN,
    "qwen3-tied": replace(QWEN, tied_embeddings=True),
    "qwen3-window": replace(QWEN, sliding_window=9),
    "mixtral": MIXTRAL,
    "mixtral-window": replace(MIXTRAL, sliding_window=9, tied_embeddings=False),
    "qwen3-moe": QWEN_MOE,
    "qwen3-moe-dense-first": replace(QWEN_MOE, moe=replace(QWEN_MOE.moe, first_dense=2, normalize=True)),
    "qwen3-moe-window": replace(QWEN_MOE, sliding_window=9),
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-no-groups": replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, groups=1, top_groups=1, normalize=False)),
    "deepseek-v3-no-query-latent": replace(DEEPSEEK, mla=replace(DEEPSEEK.mla, q_rank=0)),
    "deepseek-v3-dense": replace(DEEPSEEK, moe=Moe()),
}


def random_model(arch: Arch) -> Transformer:
    """Weights far from their initial values, norms included, so that a swapped name shows."""
    torch.manual_seed(5)
    model = Transformer(arch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (1.0 if parameter.dim() == 1 else 0.0))
        for buffer in model.buffers():
            buffer.normal_()  # biases that decide who is chosen
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
    shapes = tensor_shapes(SHAPES[name])
    assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == shapes
    theirs = [n for names in huggingface_names(SHAPES[name], shapes).values() for n in names]
    assert len(set(theirs)) == len(theirs) == len(huggingface_shapes(SHAPES[name]))


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
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in model.state_dict().values())


def test_weights_can_be_read_by_whoever_reads_the_config(tmp_path):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_bfloat16_is_stored_as_bfloat16(tmp_path):
    model = random_model(LLAMA)
    _, state = import_huggingface(write(tmp_path / "hf", model, dtype="bfloat16"))
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    assert torch.equal(state["embed.weight"], model.state_dict()["embed.weight"].bfloat16())
    with refused("E-EXPORT-DTYPE", dtype="float8"):
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
    ("change", "found"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_parameters": None}, "llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": None}, "linear"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": 3}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "auto_map"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
    ],
)
def test_what_ingot_does_not_compute_is_refused(tmp_path, change, found):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    edit_config(folder, **change)
    with refused("E-HF-IMPORT", path=str(folder / "config.json")) as caught:
        import_huggingface(folder)
    assert named(caught.value.facts["problems"], found)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
    ],
)
def test_classes_that_ingot_does_not_compute_are_refused(tmp_path, change):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    edit_config(folder, **change)
    with refused("E-HF-CLASS", path=str(folder / "config.json"), **change):
        import_huggingface(folder)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_size": "48"}, "d_model"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"vocab_size": "ABSENT"}, "vocab_size"),
    ],
)
def test_settings_of_no_model_are_refused_by_the_name_in_the_file(tmp_path, change, key):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    edit_config(folder, **change)
    with refused("E-CONFIG-SETTINGS", keys=[key]) as caught:
        import_huggingface(folder)
    assert named(caught.value.facts["problems"], *change)


@pytest.mark.parametrize(
    ("arch", "change", "found"),
    [
        (MIXTRAL, {"num_experts_per_tok": "ABSENT"}, "num_experts_per_tok"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts"),
        (MIXTRAL, {"use_sliding_window": True}, "use_sliding_window"),
        (MIXTRAL, {"sliding_window": "4k"}, "sliding_window"),
        (QWEN_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers = [1]"),
        (QWEN_MOE, {"mlp_only_layers": 1}, "mlp_only_layers"),
        (QWEN_MOE, {"norm_topk_prob": None}, "norm_topk_prob"),
        (QWEN, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "max_window_layers = 2"),
        (QWEN, {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]}, "full_attention"),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn", "factor": 40}, "rope_parameters": "ABSENT"}, "yarn"),
        (DEEPSEEK, {"rope_interleave": None}, "rope_interleave"),
        (DEEPSEEK, {"rms_norm_eps": 1e-5}, "norm_eps"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (DEEPSEEK, {"topk_group": 3}, "top_groups = 3"),
        (DEEPSEEK, {"n_shared_experts": 0}, "shared_experts"),
        (DEEPSEEK, {"n_group": "ABSENT"}, "n_group"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_experts_windows_and_latents_that_ingot_does_not_compute_are_refused(tmp_path, arch, change, found):
    folder = write(tmp_path / "hf", random_model(arch))
    edit_config(folder, **change)
    of_no_model = found in ("num_local_experts", "sliding_window", "norm_topk_prob")
    with refused("E-CONFIG-SETTINGS" if of_no_model else "E-HF-IMPORT") as caught:
        import_huggingface(folder)
    assert named(caught.value.facts["problems"], found)


@pytest.mark.parametrize(
    ("arch", "settings", "found"),
    [
        (MIXTRAL, {"normalize": False}, ["normalize = False"]),
        (MIXTRAL, {"first_dense": 1}, ["first_dense = 1"]),
        (MIXTRAL, {"shared_experts": 1, "bias_rate": 0.01}, ["shared_experts = 1", "bias_rate = 0.01"]),
        (QWEN_MOE, {"scores": "sigmoid"}, ["scores = 'sigmoid'"]),
        (QWEN_MOE, {"scale": 2.0}, ["scale = 2.0"]),
        (QWEN_MOE, {"groups": 2, "top_groups": 1}, ["groups = 2"]),
        (DEEPSEEK, {"scores": "softmax"}, ["scores = 'softmax'"]),
        (DEEPSEEK, {"shared_experts": 0}, ["shared_experts = 0"]),
        (DEEPSEEK, {"top_k": 2}, ["top_k = 2", "4 to 5"]),
    ],
)
def test_experts_that_no_class_of_transformers_computes_are_not_written(tmp_path, arch, settings, found):
    arch = replace(arch, moe=replace(arch.moe, **settings))
    with refused("E-HF-EXPORT") as caught:
        write(tmp_path / "hf", random_model(arch))
    assert named(caught.value.facts["problems"], *found)
    assert list((tmp_path / "hf").iterdir()) == []


@pytest.mark.parametrize(
    ("arch", "settings", "way"),
    [
        (MIXTRAL, {"normalize": False}, "qk_norm = true"),
        (MIXTRAL, {"first_dense": 1}, "qk_norm = true"),
        (QWEN_MOE, {"scores": "sigmoid"}, "model.mla"),
    ],
)
def test_the_setting_that_leads_to_another_class_is_the_fix(arch, settings, way):
    with refused("E-HF-EXPORT") as caught:
        huggingface_config(replace(arch, moe=replace(arch.moe, **settings)), eot_id=0, dtype="float32")
    assert named([caught.value.fix], way)


def test_a_way_out_is_named_only_where_it_leads_out():
    scaled = replace(MIXTRAL, moe=replace(MIXTRAL.moe, scale=2.0, normalize=False))
    with refused("E-HF-EXPORT") as caught:
        huggingface_config(scaled, eot_id=0, dtype="float32")
    assert caught.value.fix and not named([caught.value.fix], "qk_norm")


def test_what_only_balances_experts_in_training_is_left_out(tmp_path):
    moe = replace(MIXTRAL.moe, noise=0.5, sequence_loss=0.01, global_loss=0.02, z_loss=1e-3)
    model = random_model(replace(MIXTRAL, moe=replace(moe, capacity_factor=0.5, overflow="fallback")))
    assert {"blocks.0.moe.router.load", "blocks.0.moe.fallback.down.weight"} < model.state_dict().keys()
    arch, state = import_huggingface(write(tmp_path / "hf", model))
    assert arch == MIXTRAL
    assert state.keys() == Transformer(MIXTRAL).state_dict().keys()


def test_a_model_without_biases_is_written_with_those_that_change_nothing(tmp_path, tokens_BT):
    transformers = pytest.importorskip("transformers")
    model = random_model(replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, bias_rate=0.0)))
    folder = write(tmp_path / "hf", model)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    with torch.no_grad():
        assert (theirs.eval()(tokens_BT).logits - model(tokens_BT)).abs().max().item() <= 1e-5


def test_biases_of_routers_are_never_rounded(tmp_path):
    model = random_model(DEEPSEEK)
    _, state = import_huggingface(write(tmp_path / "hf", model, dtype="bfloat16"))
    name = "blocks.1.moe.router.bias"
    assert torch.equal(state[name], model.state_dict()[name])
    assert {t.dtype for n, t in state.items() if not n.endswith("bias")} == {torch.bfloat16}


def test_rotary_rows_that_do_not_lie_in_pairs_are_read(tmp_path, tokens_BT):
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path / "hf", random_model(DEEPSEEK))
    in_pairs = import_huggingface(folder)[1]
    edit_config(folder, rope_interleave=False)
    arch, state = import_huggingface(folder)
    assert not torch.equal(state["blocks.0.attention.q_up.weight"], in_pairs["blocks.0.attention.q_up.weight"])
    ours = Transformer(arch)
    ours.load_state_dict(state)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert (theirs.eval()(tokens_BT).logits - ours(tokens_BT)).abs().max().item() <= 1e-5


@pytest.mark.parametrize("arch", [MIXTRAL, QWEN_MOE, DEEPSEEK], ids=["mixtral", "qwen3-moe", "deepseek-v3"])
def test_published_checkpoints_have_a_matrix_for_each_expert(arch, tmp_path):
    model = random_model(arch)
    on_disk = load_file(write(tmp_path / "hf", model) / "model.safetensors")
    third = "block_sparse_moe.experts.2.w2" if arch is MIXTRAL else "mlp.experts.2.down_proj"
    expected = model.state_dict()["blocks.1.moe.experts.down.weight"].unflatten(0, (-1, arch.d_model))[2]
    assert torch.equal(on_disk[f"model.layers.1.{third}.weight"], expected)


PUBLISHED = {
    # config.json of mistralai/Mixtral-8x7B-v0.1 and of Qwen/Qwen3-30B-A3B, and how many parameters their files hold.
    46_702_792_704: {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 32000,
    },
    30_532_122_624: {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("parameters", PUBLISHED)
def test_published_models_have_as_many_parameters_as_their_files(parameters):
    arch = arch_of(PUBLISHED[parameters], "config.json")
    assert sum(math.prod(shape) for shape in huggingface_shapes(arch).values()) == parameters
    assert (arch.rope_theta, arch.sliding_window, arch.moe.normalize) == (1e6, 0, True)


def test_all_config_problems_come_at_once(tmp_path):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    edit_config(folder, attention_bias=True, hidden_act="gelu", rope_parameters={"rope_type": "yarn"})
    with refused("E-HF-IMPORT") as caught:
        import_huggingface(folder)
    assert len(caught.value.facts["problems"]) == 3
    assert named(caught.value.facts["problems"], "attention_bias", "gelu", "yarn")


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


WRITTEN = [huggingface_config(arch, eot_id=0, dtype="float32") for arch in (QWEN, MIXTRAL, QWEN_MOE, DEEPSEEK)]
ABSENT_KEYS = ("rope_scaling", "layer_types", "quantization_config", "num_local_experts", "head_dim", "sliding_window")
KEYS = [(config, key) for config in WRITTEN for key in (*config, *ABSENT_KEYS)]


@given(st.sampled_from(KEYS), json_values)
def test_any_value_of_any_key_is_read_or_refused(place, value):
    config, key = place
    try:
        assert isinstance(arch_of(config | {key: value}, "config.json"), Arch)
    except ConfigError as error:
        places = error.facts["problems"] if error.code == "E-CONFIG-SETTINGS" else [error.facts["path"]]
        assert all(place.startswith("config.json") for place in places)


def test_pickled_weights_are_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was opened",))

    folder = write(tmp_path / "hf", random_model(LLAMA))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with refused("E-WEIGHTS-NONE", path=str(folder), pickled=["pytorch_model.bin"]):
        import_huggingface(folder)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda t: t.pop("model.norm.weight"), ["model.norm.weight"]),
        (lambda t: t.update({"model.norm.bias": torch.zeros(48)}), ["model.norm.bias"]),
        (lambda t: t.update({"model.norm.weight": torch.zeros(49)}), ["model.norm.weight", "[49]", "[48]"]),
        (lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int64)}), ["model.norm.weight", "I64"]),
        (lambda t: t.update({"lm_head.weight": torch.zeros(97, 48)}), ["lm_head.weight", "model.embed_tokens.weight"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, found):
    folder = write(tmp_path / "hf", random_model(LLAMA))
    change_tensors(folder, change)
    with refused("E-WEIGHTS-MISMATCH", path=str(folder)) as caught:
        import_huggingface(folder)
    (problem,) = caught.value.facts["problems"]
    assert named([problem], *found)


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
    with refused("E-CKPT-OTHER-MODEL", tensor="norm.weight"):
        write_model(tmp_path, LLAMA, state, eot_id=0)
