"""A model that torch.distributed.checkpoint saved becomes a folder from which a run starts with the same bits."""

import json
from dataclasses import replace

import pytest
from tests.expect import RecordedMeter, named, refused, reported

torch = pytest.importorskip("torch")

from ingot.cli.main import main  # noqa: E402
from ingot.errors import CheckpointError  # noqa: E402
from ingot.hub.arch_config import huggingface_config  # noqa: E402
from ingot.schema.arch import Arch, Mla, Moe  # noqa: E402
from ingot.trainer.convert import imported  # noqa: E402
from ingot.trainer.convert.imported import import_dcp  # noqa: E402
from ingot.trainer.export.model_folder import (  # noqa: E402
    first_weights,
    import_huggingface,
    tensor_shapes,
    to_huggingface,
)
from ingot.trainer.model.transformer import Transformer  # noqa: E402

DENSE = Arch(vocab_size=40, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, d_ffn=24)
TIED = replace(DENSE, tied_embeddings=True)
UNTIED = replace(DENSE, tied_embeddings=False)
MIXTRAL = replace(UNTIED, moe=Moe(num_experts=4, top_k=2, d_expert=12))
DEEPSEEK = replace(
    UNTIED,
    num_kv_heads=4,
    head_dim=8,
    norm_eps=1e-6,
    mla=Mla(q_rank=8, kv_rank=6, nope_dim=4, rope_dim=4, v_dim=6),
    moe=Moe(num_experts=4, top_k=2, d_expert=12, shared_experts=1, first_dense=1, scores="sigmoid", bias_rate=0.001),
)
BLOCK = {
    "attention_norm": "attention_norm",
    "attention.q": "attention.wq",
    "attention.k": "attention.wk",
    "attention.v": "attention.wv",
    "attention.o": "attention.wo",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.down": "feed_forward.w2",
    "mlp.up": "feed_forward.w3",
}


def weights(arch: Arch, dtype=torch.float32) -> dict:
    """The tensors of a model under ingot's names."""
    return {name: torch.randn(shape).to(dtype) for name, shape in tensor_shapes(arch).items()}


def torchtitan(arch: Arch, state: dict) -> dict:
    """The state under torchtitan's names: what it makes of a Hugging Face model (its rows h and h + H/2 of a head are
    neighbors there)."""

    def neighbors(tensor):
        return tensor.view(-1, 2, arch.head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)

    named = {
        "tok_embeddings.weight": state["embed.weight"],
        "norm.weight": state["norm.weight"],
        "freqs_cis": torch.zeros(8, 3, dtype=torch.complex64),
    }
    if "head.weight" in state:
        named["output.weight"] = state["head.weight"]
    for layer in range(arch.num_layers):
        for ours, theirs in BLOCK.items():
            tensor = state[f"blocks.{layer}.{ours}.weight"]
            turned = neighbors(tensor) if ours in ("attention.q", "attention.k") else tensor
            named[f"layers.{layer}.{theirs}.weight"] = turned
    return named


def assert_imported(folder, arch, state):
    found_arch, found = import_huggingface(folder)
    assert found_arch.num_layers == arch.num_layers and found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.parametrize(("arch", "dtype"), [(UNTIED, torch.float32), (TIED, torch.bfloat16), (UNTIED, torch.half)])
def test_torchtitans_names(save_dcp, tmp_path, arch, dtype):
    state = weights(arch, dtype)
    folder = save_dcp({"model": torchtitan(arch, state), "train_state": {"step": torch.tensor(3)}, "epoch": 2})
    meter = RecordedMeter()
    found = import_dcp(folder, tmp_path / "out", arch, eot_id=0, meter=meter)
    meter.require_whole("reading", "writing", "comparing")
    assert (found.system, found.prefix, found.left) == ("torchtitan", "model.", 3)
    assert found.dtype == ("bfloat16" if dtype == torch.bfloat16 else "float32")
    assert found.parameters == sum(tensor.numel() for tensor in state.values())
    assert_imported(tmp_path / "out", arch, state)


def test_torchtitans_rotation_gives_the_same_logits(save_dcp, tmp_path):
    """Scores depend on the order of rows only through the rotation: neighbors turned together, as torchtitan does."""
    state = weights(UNTIED)
    theirs = torchtitan(UNTIED, state)
    q = theirs["layers.0.attention.wq.weight"].view(4, 6, 16)
    k = theirs["layers.0.attention.wk.weight"].view(2, 6, 16)
    x = torch.randn(2, 16)
    angles = 5 * UNTIED.rope_theta ** -(torch.arange(0, 6, 2) / 6)

    def turned(head, vector, position):
        pairs = torch.view_as_complex((head @ vector).view(3, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones(3), angles * position)).flatten()

    score = turned(q[1], x[0], 1.0) @ turned(k[0], x[1], 0.0)
    from ingot.trainer.model.layers import rotate

    ours_q = (state["blocks.0.attention.q.weight"].view(4, 6, 16)[1] @ x[0]).view(1, 1, 1, 6)
    ours_k = state["blocks.0.attention.k.weight"].view(2, 6, 16)[0] @ x[1]
    cos, sin = angles.cos().view(1, 3), angles.sin().view(1, 3)
    assert torch.allclose(rotate(ours_q, cos, sin).flatten() @ ours_k, score, atol=1e-5)
    folder = save_dcp(theirs)
    import_dcp(folder, tmp_path / "out", UNTIED, eot_id=0)
    assert_imported(tmp_path / "out", UNTIED, state)


@pytest.mark.parametrize("arch", [TIED, UNTIED, MIXTRAL, DEEPSEEK], ids=["tied", "untied", "mixtral", "deepseek"])
@pytest.mark.parametrize("key", ["", "model", "state.app"])
def test_hugging_faces_names(save_dcp, tmp_path, arch, key):
    state = weights(arch)
    theirs = to_huggingface(arch, state)
    if arch is TIED:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"].clone()
    kept = theirs
    for part in filter(None, reversed(key.split("."))):
        kept = {part: kept}
    moments = {"state": {"model.embed_tokens.weight": {"exp_avg": torch.zeros(3)}}}
    found = import_dcp(save_dcp(kept | {"optimizer": moments}), tmp_path / "out", arch, eot_id=1)
    assert (found.system, found.prefix, found.left) == ("Hugging Face", f"{key}." if key else "", 1)
    assert_imported(tmp_path / "out", arch, state)


def test_names_with_wrappers(save_dcp, tmp_path):
    state = weights(UNTIED)
    theirs = torchtitan(UNTIED, state)
    wrapped = {
        n.replace("layers.1.", "layers.1._checkpoint_wrapped_module._orig_mod."): tensor for n, tensor in theirs.items()
    }
    import_dcp(save_dcp(wrapped), tmp_path / "out", UNTIED, eot_id=0)
    assert_imported(tmp_path / "out", UNTIED, state)


def save_sharded(rank, ranks, folder, state):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    dcp.save({"model": {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in state.items()}}, checkpoint_id=folder)


def test_a_sharded_model_starts_a_run_with_the_same_bits(fork_ranks, tmp_path):
    """The function that gives a run its first weights reads what was imported, also in blocks."""
    state = weights(UNTIED)
    fork_ranks(save_sharded, 2, tmp_path / "dcp", torchtitan(UNTIED, state) | {"freqs_cis": torch.zeros(3)})
    import_dcp(tmp_path / "dcp", tmp_path / "out", UNTIED, eot_id=0)
    first = first_weights(tmp_path / "out", UNTIED, drawn=None)
    model = Transformer(UNTIED)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        half = (shape[0] // 2, *shape[1:])
        low = first(name, shape, (0,) * len(shape), half)
        high = first(name, shape, (half[0], *(0,) * (len(shape) - 1)), (shape[0] - half[0], *shape[1:]))
        assert torch.equal(torch.cat((low, high)), state[name]), name


# -- refused --


def refused_import(save_dcp, tmp_path, code, saved, arch=UNTIED, **options):
    with refused(code) as caught:
        import_dcp(save_dcp(saved), tmp_path / "out", arch, eot_id=0, **options)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]  # no temporary folder
    return caught.value.facts


def test_unknown_missing_and_misshapen_tensors_are_listed(save_dcp, tmp_path):
    theirs = torchtitan(UNTIED, weights(UNTIED))
    theirs["layers.0.attention.wq.bias"] = torch.zeros(16)
    theirs["norm.weight"] = torch.zeros(17)
    del theirs["layers.1.ffn_norm.weight"]
    facts = refused_import(save_dcp, tmp_path, "E-DCP-MODEL", {"model": theirs})
    assert len(facts["problems"]) == 3
    assert named(
        facts["problems"], "model.layers.0.attention.wq.bias", "model.norm.weight", "model.layers.1.ffn_norm.weight"
    )


def test_a_model_with_more_layers_is_refused(save_dcp, tmp_path):
    deeper = replace(UNTIED, num_layers=3)
    facts = refused_import(save_dcp, tmp_path, "E-DCP-MODEL", torchtitan(deeper, weights(deeper)))
    assert len(facts["problems"]) == len(BLOCK)


def test_a_folder_without_a_known_model_is_refused(save_dcp, tmp_path):
    facts = refused_import(save_dcp, tmp_path, "E-DCP-MODEL", {"net": {"0.weight": torch.zeros(3)}})
    assert named(facts["problems"], "net.0.weight", "tok_embeddings.weight", "model.embed_tokens.weight")


def test_two_models_need_a_prefix(save_dcp, tmp_path):
    state, other = weights(UNTIED), weights(UNTIED)
    saved = {"model": torchtitan(UNTIED, state), "ema": torchtitan(UNTIED, other)}
    facts = refused_import(save_dcp, tmp_path, "E-DCP-PREFIX", saved)
    assert sorted(facts["prefixes"]) == ["ema.", "model."]
    import_dcp(tmp_path / "dcp", tmp_path / "out", UNTIED, eot_id=0, prefix="ema.")
    assert_imported(tmp_path / "out", UNTIED, other)


def test_a_tied_head_that_differs_is_refused(save_dcp, tmp_path):
    theirs = to_huggingface(TIED, weights(TIED))
    theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"] + 1
    facts = refused_import(save_dcp, tmp_path, "E-DCP-MODEL", theirs, TIED)
    assert named(facts["problems"], "lm_head.weight")


def test_a_weight_of_another_dtype_is_refused(save_dcp, tmp_path):
    theirs = torchtitan(UNTIED, weights(UNTIED))
    theirs["norm.weight"] = theirs["norm.weight"].double()
    refused_import(save_dcp, tmp_path, "E-DCP-DTYPE", theirs)


def test_a_folder_that_exists_is_not_overwritten(save_dcp, tmp_path):
    folder = save_dcp(torchtitan(UNTIED, weights(UNTIED)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with refused("E-CONVERT-FOLDER", path=str(tmp_path / "out")):
        import_dcp(folder, tmp_path / "out", UNTIED, eot_id=0)
    assert (tmp_path / "out" / "mine").read_text() == "kept"
    import_dcp(folder, tmp_path / "new", UNTIED, eot_id=0)


def test_weights_that_were_written_otherwise_are_found(save_dcp, tmp_path, monkeypatch):
    write = imported.write_model

    def careless(folder, arch, state, **options):
        state = dict(state)
        state["norm.weight"] = state["norm.weight"] + 1e-6
        write(folder, arch, state, **options)

    monkeypatch.setattr(imported, "write_model", careless)
    folder = save_dcp(torchtitan(UNTIED, weights(UNTIED)))
    with pytest.raises(CheckpointError) as caught:
        import_dcp(folder, tmp_path / "out", UNTIED, eot_id=0)
    assert caught.value.code == "E-CKPT-READ-BACK" and not (tmp_path / "out").exists()


def test_the_command_takes_model_and_token_from_a_folder(save_dcp, tmp_path, capsys):
    """The end-of-text token is that of config.json; a preset has none."""
    folder = save_dcp(torchtitan(UNTIED, weights(UNTIED)))
    (tmp_path / "like").mkdir()
    config = huggingface_config(UNTIED, eot_id=5, dtype="float32")
    (tmp_path / "like" / "config.json").write_text(json.dumps(config))
    command = ["ckpt", "import", str(folder), str(tmp_path / "out"), "--json", "--model"]
    other = ["ckpt", "import", str(folder), str(tmp_path / "other"), "--json", "--model"]
    assert main([*command, str(tmp_path / "like")]) == 0
    assert json.loads(capsys.readouterr().out)["system"] == "torchtitan"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 5
    assert main([*other, "tiny"]) == 2
    reported(capsys.readouterr().out, "E-EOT-UNSET", vocab_size=4096)
    assert main([*other, str(tmp_path / "like"), "--eot-id", "40"]) == 2
    reported(capsys.readouterr().out, "E-EOT-UNSET", vocab_size=40)
