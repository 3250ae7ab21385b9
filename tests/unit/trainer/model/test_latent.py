"""Multi-head latent attention against its equations, written out for one head and one token at a time."""

from dataclasses import replace

import pytest
import torch

from ingot.schema.arch import Arch, Mla
from ingot.trainer.model.attention import AttentionMaskSpec, LatentAttention, attend_locally
from ingot.trainer.model.generate import KVCache
from ingot.trainer.model.init import DEVIATION, initial_value, initialize
from ingot.trainer.model.layers import rotary_tables
from ingot.trainer.model.transformer import Transformer

# No two of the widths are equal, so that none can be taken for another.
MLA = Mla(q_rank=10, kv_rank=7, nope_dim=8, rope_dim=4, v_dim=6)
ARCH = Arch(
    vocab_size=53, d_model=18, num_layers=2, num_heads=3, num_kv_heads=3, head_dim=12, d_ffn=20, max_seq_len=32, mla=MLA
)
NO_QUERY_LATENT = replace(ARCH, mla=replace(MLA, q_rank=0))
FORMS = pytest.mark.parametrize("arch", [ARCH, NO_QUERY_LATENT], ids=["query latent", "no query latent"])
DOCUMENTS_BS = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 2, 2, 2, 2]])


def spread(module, seed=1):
    """Weights so far from their first values that norms, angles and scores all matter to the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() * 0.5 + (parameter.dim() == 1))
    return module


def attention_of(arch):
    return spread(LatentAttention(arch, attend_locally).double())


def stream(arch, batch=2, tokens=9):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, tokens, arch.d_model, generator=generator, dtype=torch.float64, requires_grad=True)


def rotary(arch, tokens):
    return rotary_tables(torch.arange(tokens), arch.mla.rope_dim, arch.rope_theta)


def normed(x, norm):
    return x / (x.square().mean() + norm.eps).sqrt() * norm.weight


def turned(x_R, angle):
    """The pairs (i, i + R/2) as complex numbers."""
    pairs = torch.complex(*x_R.chunk(2)) * angle
    return torch.cat((pairs.real, pairs.imag))


def plain(attention, arch, x_BTD, looks):
    """looks(sequence, t, s): whether token t looks at token s."""
    mla, (cos, sin) = arch.mla, rotary(arch, x_BTD.shape[1])
    angles = torch.complex(cos.double(), sin.double())
    out = []
    for b, x_TD in enumerate(x_BTD):
        queries, keys, values = [], [], []
        for x, angle in zip(x_TD, angles, strict=True):
            if mla.q_rank:
                q = attention.q_up.weight @ normed(attention.q_down.weight @ x, attention.q_latent_norm)
            else:
                q = attention.q.weight @ x
            queries.append([torch.cat((h[: mla.nope_dim], turned(h[mla.nope_dim :], angle))) for h in q.chunk(3)])
            down = attention.kv_down.weight @ x
            up = attention.kv_up.weight @ normed(down[: mla.kv_rank], attention.kv_latent_norm)
            shared = turned(down[mla.kv_rank :], angle)
            keys.append([torch.cat((h[: mla.nope_dim], shared)) for h in up.chunk(3)])
            values.append([h[mla.nope_dim :] for h in up.chunk(3)])
        for t in range(len(x_TD)):
            seen = [s for s in range(t + 1) if looks(b, t, s)]
            heads = []
            for n in range(3):
                scores = torch.stack([queries[t][n] @ keys[s][n] for s in seen])
                weights = (scores / (mla.nope_dim + mla.rope_dim) ** 0.5).softmax(0)
                heads.append(sum(w * values[s][n] for w, s in zip(weights, seen, strict=True)))
            out.append(attention.o.weight @ torch.cat(heads))
    return torch.stack(out).view(x_BTD.shape)


def check_equal(found, expected):
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 1e-12


@FORMS
@pytest.mark.parametrize(
    ("documents", "window"), [(None, 0), (DOCUMENTS_BS, 0), (DOCUMENTS_BS, 2)], ids=["causal", "documents", "window"]
)
def test_equals_its_equations_forward_and_backward(arch, documents, window):
    def looks(b, t, s):
        same = documents is None or documents[b, t] == documents[b, s]
        return same and (not window or t - s < window)

    attention, x = attention_of(arch), stream(arch)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    results = []
    for compute in (
        lambda: attention(x, rotary(arch, 9), AttentionMaskSpec(torch.arange(9), documents, window)),
        lambda: plain(attention, arch, x, looks),
    ):
        out = compute()
        leaves = [x, *attention.parameters()]
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        check_equal(found, expected)


@FORMS
def test_equals_the_deepseek_of_transformers(arch):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    mla, attention, x = arch.mla, attention_of(arch), stream(arch).detach()
    config = DeepseekV3Config(
        hidden_size=arch.d_model,
        num_attention_heads=arch.num_heads,
        num_key_value_heads=arch.num_heads,
        q_lora_rank=mla.q_rank or None,
        kv_lora_rank=mla.kv_rank,
        qk_nope_head_dim=mla.nope_dim,
        qk_rope_head_dim=mla.rope_dim,
        v_head_dim=mla.v_dim,
        rope_parameters={"rope_type": "default", "rope_theta": arch.rope_theta},
        attn_implementation="sdpa",
    )
    theirs = DeepseekV3Attention(config, 0).double()
    for norm in (theirs.q_a_layernorm, theirs.kv_a_layernorm):
        if norm is not None:  # theirs is in float32 whatever the dtype, and has an eps of its own
            norm.forward = lambda x, n=norm: torch.nn.functional.rms_norm(x, n.weight.shape, n.weight, arch.norm_eps)
    # Theirs rotates the pairs (2i, 2i + 1), ours (i, i + R/2).
    order = torch.arange(mla.rope_dim).view(2, -1).T.flatten()
    whole_head = torch.cat((torch.arange(mla.nope_dim), mla.nope_dim + order))
    query_rows = torch.cat([n * arch.head_dim + whole_head for n in range(arch.num_heads)])
    down_rows = torch.cat((torch.arange(mla.kv_rank), mla.kv_rank + order))
    weights = {name.removesuffix(".weight"): p.detach() for name, p in attention.named_parameters()}
    theirs_by_ours = {
        "q": ("q_proj", query_rows),
        "q_down": ("q_a_proj", ...),
        "q_latent_norm": ("q_a_layernorm", ...),
        "q_up": ("q_b_proj", query_rows),
        "kv_down": ("kv_a_proj_with_mqa", down_rows),
        "kv_latent_norm": ("kv_a_layernorm", ...),
        "kv_up": ("kv_b_proj", ...),
        "o": ("o_proj", ...),
    }
    renamed = {theirs_by_ours[name][0] + ".weight": w[theirs_by_ours[name][1]] for name, w in weights.items()}
    theirs.load_state_dict(renamed)
    cos, sin = rotary(arch, 9)
    tables = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    with torch.no_grad():
        causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
        expected, _ = theirs(x, tables, causal)
        check_equal(attention(x, rotary(arch, 9), AttentionMaskSpec(torch.arange(9))), expected)


@FORMS
@pytest.mark.parametrize("window", [0, 3])
def test_cached_forwards_equal_one_forward(arch, window):
    arch = replace(arch, sliding_window=window)
    model = spread(Transformer(arch).double())
    x = torch.randint(0, arch.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    cache = KVCache(arch, capacity=9)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in (x[:, :4], x[:, 4:5], x[:, 5:])]
        check_equal(torch.cat(parts, dim=1), model(x))


def test_documents_are_alone_in_the_whole_model():
    """A document does not notice it when the one before it has other tokens."""
    model = spread(Transformer(ARCH).double())
    x, other = torch.randint(0, ARCH.vocab_size, (2, 1, 9), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    mixed = torch.cat((other[:, :4], x[:, 4:]), dim=1)
    with torch.no_grad():
        check_equal(model(mixed, None, documents)[:, 4:], model(x, None, documents)[:, 4:])
        assert (model(mixed)[:, 4:] - model(x)[:, 4:]).abs().max() > 1e-3


def test_names_and_shapes_are_the_contract():
    def described(arch):
        block = Transformer(arch).blocks["1"]
        return {n: tuple(p.shape) for n, p in block.named_parameters() if n.startswith("attention.")}

    rest = {
        "attention.kv_down.weight": (7 + 4, 18),
        "attention.kv_latent_norm.weight": (7,),
        "attention.kv_up.weight": (3 * (8 + 6), 7),
        "attention.o.weight": (18, 3 * 6),
    }
    latent = {
        "attention.q_down.weight": (10, 18),
        "attention.q_latent_norm.weight": (10,),
        "attention.q_up.weight": (3 * 12, 10),
    }
    assert described(ARCH) == latent | rest
    assert described(NO_QUERY_LATENT) == {"attention.q.weight": (3 * 12, 18)} | rest


def test_first_values_only_the_way_out_is_smaller():
    model = Transformer(ARCH)
    initialize(model, ARCH, 1)
    for name, parameter in model.blocks["0"].attention.named_parameters():
        whole = initial_value(f"blocks.0.attention.{name}", (500, 400), ARCH, 1)
        expected = DEVIATION / 2 if name == "o.weight" else DEVIATION  # sqrt(2 * 2 layers)
        assert abs(whole.std().item() / expected - 1) < 0.02, name
        assert (parameter == 1).all() if parameter.dim() == 1 else 0 < parameter.std() < 0.03, name
