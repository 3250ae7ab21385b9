"""The memory terms against what the trainer's own model keeps."""

from dataclasses import replace

import pytest

from ingot.schema.arch import Arch
from ingot.theory import memory
from ingot.theory.params import count_parameters

TINY = Arch(
    vocab_size=512, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=128
)


def saved_bytes(arch: Arch, dtype, sequences: int, seq_len: int) -> int:
    """Distinct storages that autograd keeps between forward and backward, parameters excluded."""
    import torch

    from ingot.model.transformer import Transformer

    torch.set_num_threads(1)
    model = Transformer(arch).to(dtype)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, sizes = [], {}

    def pack(tensor):
        kept.append(tensor)  # alive, so that no address is used twice
        if tensor.untyped_storage().data_ptr() not in parameters:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randint(0, arch.vocab_size, (sequences, seq_len))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens, tokens)
    return sum(sizes.values())


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize(
    "arch",
    [
        TINY,
        replace(TINY, num_layers=5, d_ffn=64),
        replace(TINY, num_kv_heads=4, head_dim=32),
        replace(TINY, qk_norm=True, tied_embeddings=False),
    ],
)
def test_activations_are_what_autograd_saves(arch, precision):
    torch = pytest.importorskip("torch")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[precision]
    tokens = 8 * 128
    head_gradient = arch.vocab_size * arch.d_model * memory.COMPUTE_BYTES[precision]  # a part of the term `logits`
    predicted = memory.activations(arch, precision, tokens).value + head_gradient
    assert predicted == pytest.approx(saved_bytes(arch, dtype, 8, 128), rel=0.02)


def test_chunks_bound_the_logits():
    for vocab in (256, 4096, 128_256):
        assert memory.chunk_tokens(vocab, "cuda") * vocab * 4 <= 1 << 30
    assert memory.chunk_tokens(10**9, "cpu") == 16


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_sharded_state_is_the_usual_bytes_per_parameter(ranks):
    """16 bytes per parameter over all ranks: masters 4, gradients 4, moments 8 (Rajbhandari et al. 2020, 3.1)."""
    arch = replace(TINY, d_model=2048, d_ffn=8192, num_layers=24)
    n = count_parameters(arch)
    terms = memory.weights(arch, "bf16", ranks), memory.optimizer(arch, "bf16", ranks)
    shards = sum(t.value for t in terms) + memory.gradients_at_loss(arch, "bf16", ranks, accumulation=2).value
    assert shards * ranks == pytest.approx(16 * n)
    assert memory.checkpoint_bytes(arch, "bf16").value == 12 * n


def test_a_checkpoint_is_as_large_as_predicted():
    torch = pytest.importorskip("torch")
    from ingot.model.transformer import Transformer
    from ingot.optim.adamw import build_adamw
    from ingot.schema.run import Optim

    torch.set_num_threads(1)
    model = Transformer(TINY)
    optimizer = build_adamw(model, Optim())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens).backward()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    held = sum(t.numel() * t.element_size() for t in [*model.parameters(), *state])
    assert held == memory.checkpoint_bytes(TINY, "fp32").value


def test_logits_are_bounded_by_the_chunk():
    large = replace(TINY, vocab_size=128_256)
    short, long = (memory.logits(large, "bf16", tokens, "cuda").value for tokens in (4096, 1 << 20))
    assert long == short
    assert memory.logits(large, "bf16", 128, "cuda").value < short


def test_every_formula_shows_its_numbers():
    for term in (
        memory.weights(TINY, "bf16", 2),
        memory.activations(TINY, "bf16", 256),
        memory.gathered(TINY, "bf16"),
        memory.gradients(TINY, "bf16", 2, 1),
    ):
        assert any(c.isdigit() for c in term.formula)
