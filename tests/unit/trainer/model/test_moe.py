"""A mixture of experts against a loop over tokens and experts, written from the formulas, in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ingot.schema.arch import Arch
from ingot.schema.arch import Moe as Settings
from ingot.trainer.model import experts
from ingot.trainer.model.expert_rows import combine, sort_assignments, token_rows
from ingot.trainer.model.experts import (
    ExpertCounts,
    LocalDispatch,
    MoeLayer,
    _kernel_takes,
    grouped_product,
)
from ingot.trainer.model.generate import KVCache
from ingot.trainer.model.init import initial_value, initialize
from ingot.trainer.model.routing import RouterLoss, Routing, choose, normal_noise, within_capacity
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel.balance import updated_biases

BATCH, TOKENS, DIM = 2, 7, 8
ARCH = Arch(vocab_size=61, d_model=DIM, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ffn=12, max_seq_len=40)
EXPERTS = Settings(num_experts=6, top_k=2, d_expert=5)


def layer(settings: Settings, seed: int = 0, dtype=torch.float64) -> MoeLayer:
    """Make a layer whose weights are large enough to matter and whose buffers are not at their first values."""
    moe = MoeLayer(replace(ARCH, moe=settings), 1, LocalDispatch()).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.6, generator=generator)
        if moe.router.bias is not None:
            moe.router.bias.normal_(0, 0.3, generator=generator)
        if moe.router.load is not None:
            moe.router.load.uniform_(0, 2, generator=generator)
    return moe


def tokens(dtype=torch.float64, seed: int = 1, batch: int = BATCH, length: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, DIM, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def swiglu(gate: Tensor, up: Tensor, down: Tensor, x_D: Tensor) -> Tensor:
    return down @ (torch.nn.functional.silu(gate @ x_D) * (up @ x_D))


def expert(moe: MoeLayer, index: int, x_D: Tensor) -> Tensor:
    width = moe.moe.d_expert
    rows, down_rows = slice(index * width, (index + 1) * width), slice(index * DIM, (index + 1) * DIM)
    stacks = moe.experts
    return swiglu(stacks.gate.weight[rows], stacks.up.weight[rows], stacks.down.weight[down_rows], x_D)


def plain_scores(moe: MoeLayer, x_D: Tensor) -> Tensor:
    logits = moe.router.weight @ x_D
    return logits.softmax(0) if moe.moe.scores == "softmax" else logits.sigmoid()


def plain_choice(moe: MoeLayer, scores: list[float]) -> list[int]:
    settings = moe.moe
    bias = [0.0] * len(scores) if moe.router.bias is None else moe.router.bias.tolist()
    ranked = {e: score + bias[e] for e, score in enumerate(scores)}
    if settings.groups > 1:
        size = settings.num_experts // settings.groups
        groups = [range(g * size, (g + 1) * size) for g in range(settings.groups)]
        best = max(settings.top_k // settings.top_groups, 1)
        groups.sort(key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[:best]))
        ranked = {e: ranked[e] for group in groups[: settings.top_groups] for e in group}
    return sorted(ranked, key=lambda e: -ranked[e])[: settings.top_k]


def plain(moe: MoeLayer, x_BTD: Tensor) -> Tensor:
    """Token by token, expert by expert; who is kept is counted choice by choice."""
    settings, sequences = moe.moe, []
    for x_TD in x_BTD:
        scores = [plain_scores(moe, x_D) for x_D in x_TD]
        choices = [plain_choice(moe, score.tolist()) for score in scores]
        limit = math.ceil(settings.capacity_factor * settings.top_k * len(x_TD) / settings.num_experts) or len(x_TD)
        taken, kept = [0] * settings.num_experts, set()
        for k in range(settings.top_k):
            for t, chosen in enumerate(choices):
                if taken[chosen[k]] < limit:
                    taken[chosen[k]] += 1
                    kept.add((t, k))
        made = []
        for t, x_D in enumerate(x_TD):
            weights = scores[t][choices[t]]
            weights = settings.scale * (weights / weights.sum() if settings.normalize else weights)
            y_D = torch.zeros_like(x_D)
            for k, e in enumerate(choices[t]):
                if (t, k) in kept:
                    y_D = y_D + weights[k] * expert(moe, e, x_D)
                elif moe.fallback is not None:
                    dense = moe.fallback
                    y_D = y_D + weights[k] * swiglu(dense.gate.weight, dense.up.weight, dense.down.weight, x_D)
            if moe.shared is not None:
                shared = moe.shared
                y_D = y_D + swiglu(shared.gate.weight, shared.up.weight, shared.down.weight, x_D)
            made.append(y_D)
        sequences.append(torch.stack(made))
    return torch.stack(sequences)


def run(moe: MoeLayer, x_BTD: Tensor, router_loss: RouterLoss | None = None, **more) -> Tensor:
    return moe(x_BTD, torch.arange(x_BTD.shape[1]), router_loss, **more)


def gradients(y: Tensor, moe: MoeLayer, x: Tensor) -> list[Tensor]:
    """Return the gradients of a sum that weighs every number of y differently; 0 for a weight that no token used."""
    counts = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return list(torch.autograd.grad((y * counts).sum(), [x, *moe.parameters()]))


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> bool:
    return bool((ours - theirs).abs().max() <= tolerance * max(float(theirs.detach().abs().max()), 1e-3))


VARIANTS = [
    {},
    {"normalize": False},
    {"scores": "sigmoid"},
    {"scores": "sigmoid", "normalize": False, "scale": 2.5},
    {"top_k": 1, "normalize": False},
    {"top_k": 3, "scale": 1.5},
    {"top_k": 4, "scores": "sigmoid"},
    {"top_k": 6},
    {"shared_experts": 2},
    {"bias_rate": 0.1},
    {"bias_rate": 0.1, "scores": "sigmoid", "shared_experts": 1},
    {"bias_rate": 0.1, "normalize": False},
    {"groups": 3, "top_groups": 2},
    {"groups": 3, "top_groups": 2, "top_k": 4, "bias_rate": 0.1},
    {"groups": 3, "top_groups": 2, "top_k": 1, "normalize": False},
    {"groups": 2, "top_groups": 1, "top_k": 3},
    {"capacity_factor": 0.5},
    {"capacity_factor": 1.0, "top_k": 3, "bias_rate": 0.1},
    {"capacity_factor": 0.6, "overflow": "fallback"},
    {"capacity_factor": 0.4, "overflow": "fallback", "top_k": 4, "scores": "sigmoid", "shared_experts": 1},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_equals_the_loop_in_value_and_all_gradients(changes):
    moe, x = layer(replace(EXPERTS, **changes)), tokens()
    ours, theirs = run(moe, x, router_loss()), plain(moe, x)
    assert close(ours, theirs)
    for mine, reference in zip(gradients(ours, moe, x), gradients(theirs, moe, x), strict=True):
        assert close(mine, reference)


@pytest.mark.parametrize("changes", [{}, {"capacity_factor": 0.5}, {"capacity_factor": 0.5, "overflow": "fallback"}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_tokens_on_two_experts_and_the_others_empty(changes, dtype):
    settings = replace(EXPERTS, d_expert=4, bias_rate=0.1, **changes)
    moe, x = layer(settings, dtype=dtype), tokens(dtype)
    moe.router.bias.copy_(torch.tensor([9.0, -9, 8, -9, -9, -9]))
    ours, theirs = run(moe, x, router_loss()), plain(moe, x)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert close(ours, theirs, tolerance)
    for mine, reference in zip(gradients(ours, moe, x), gradients(theirs, moe, x), strict=True):
        assert close(mine, reference, tolerance)
    gate = gradients(run(moe, x, router_loss()), moe, x)[2].view(6, -1)
    assert [bool(part.any()) for part in gate] == [True, False, True, False, False, False]


@pytest.mark.parametrize("kept", [1.0, 0.7])
@pytest.mark.parametrize("blocks", [0, 2])
def test_bf16_sums_are_rounded_once(kept, blocks):
    """Sums over a token's rows, forward and backward, are float32 with float32 weights: only the results are bf16.
    Rows may be in blocks with fill; it has no part in any sum, whatever is computed for it."""
    generator = torch.Generator().manual_seed(0)
    keep_MK = torch.rand(40, 8, generator=generator) < kept
    experts_MK = torch.rand(40, 8, generator=generator).argsort(-1)
    weights_MK = torch.rand(40, 8, generator=generator)
    routing = Routing(experts_MK, weights_MK, None if kept == 1 else keep_MK, experts=8, most_rows=40, even_rows=40)
    ordered = sort_assignments(routing)
    rows = ordered.in_blocks(blocks, 165) if blocks else ordered.first(int(ordered.counts_E.sum()), exactly=True)
    x = torch.randn(40, DIM, generator=generator).bfloat16()
    made = torch.randn(len(rows.assignments_R), DIM, generator=generator).bfloat16()
    if rows.fill_R is not None:
        assert rows.fill_R.any() and not token_rows(x, rows)[rows.fill_R].any()
    x_grad, y_grad = (torch.randn(shape, generator=generator).bfloat16() for shape in (made.shape, x.shape))

    def results(kind, wide):
        inputs = (x, kind), (made, kind), (routing.weights_MK, wide)
        leaves = [t.to(dtype).requires_grad_() for t, dtype in inputs]
        spread_RD, y_MD = token_rows(leaves[0], rows), combine(leaves[1], leaves[2], rows)
        return [y_MD, *torch.autograd.grad((spread_RD, y_MD), leaves, (x_grad.to(kind), y_grad.to(kind)))]

    ours, exact = results(torch.bfloat16, torch.float32), results(torch.float64, torch.float64)
    assert [t.dtype for t in ours] == [torch.bfloat16] * 3 + [torch.float32]
    for mine, reference in zip(ours, exact, strict=True):
        rounding = 2**-8 if mine.dtype == torch.bfloat16 else 0
        assert ((mine - reference).abs() <= rounding * reference.abs() + 1e-5).all()


def test_scores_that_are_all_zero_still_share_out_the_token():
    """sigmoid(-200) is 0 in float32, and 0 / 0 would be a token without a value."""
    moe = layer(replace(EXPERTS, scores="sigmoid", sequence_loss=0.1, z_loss=0.1), dtype=torch.float32)
    x = tokens(torch.float32)
    with torch.no_grad():
        moe.router.weight.copy_(
            torch.full_like(moe.router.weight, -400.0).addcmul_(torch.arange(6.0)[:, None], -x[0, 0])
        )
        x[:] = x.abs() + 0.1
    y = run(moe, x, router_loss())
    assert y.isfinite().all() and y.abs().amax(-1).min() > 0
    assert all(gradient.isfinite().all() for gradient in gradients(y, moe, x))


def test_who_wins_a_tie_does_not_depend_on_the_batch():
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.2, 0.5, 0.5], [0.1] * 6, [0.0] * 6]).repeat(50, 1)
    for settings in (EXPERTS, replace(EXPERTS, top_k=3), replace(EXPERTS, groups=3, top_groups=2)):
        whole = choose(scores[None], None, settings)[0]
        alone = torch.cat([choose(row[None, None], None, settings)[0] for row in scores])
        assert (whole == alone).all()
        assert (whole.sort(-1).values.diff(dim=-1) > 0).all()


# --- capacity ---


def test_capacity_by_hand():
    """4 experts, 2 of each of 6 tokens: 0.67 x 2 x 6 / 4 = 2.01, so experts take 3. First choices come first."""
    settings = Settings(num_experts=4, top_k=2, d_expert=4, capacity_factor=0.67)
    first, second = [0, 0, 1, 0, 0, 1], [1, 1, 0, 2, 3, 2]
    kept = within_capacity(torch.tensor([first, second]).T[None], settings)[0]
    # Expert 0: first choice of tokens 0, 1, 3, then full: token 4, and token 2's second choice, are late.
    assert kept[:, 0].tolist() == [True, True, True, True, False, True]
    # Expert 1: first choice of tokens 2 and 5, so one of the second choices of tokens 0 and 1 has room.
    assert kept[:, 1].tolist() == [True, False, False, True, True, True]


def test_capacity_is_of_each_sequence():
    choices = torch.randint(0, 4, (5, 16, 2), generator=torch.Generator().manual_seed(0))
    settings = Settings(num_experts=4, top_k=2, d_expert=4, capacity_factor=0.8)
    together = within_capacity(choices, settings)
    assert (together == torch.cat([within_capacity(one[None], settings) for one in choices])).all()
    assert not together.all()


@pytest.mark.parametrize("overflow", ["drop", "fallback"])
def test_a_capacity_acts_in_training_only(overflow):
    limited, x = layer(replace(EXPERTS, capacity_factor=0.5, overflow=overflow)), tokens()
    free = layer(EXPERTS)
    free.load_state_dict(limited.state_dict(), strict=overflow == "drop")
    assert not close(run(limited, x, router_loss()), run(free, x), 1e-3)
    assert torch.equal(run(limited, x), run(free, x))


def test_a_score_does_not_know_what_comes_later():
    """Ranks that share sequences fill texts up to a length that they can divide, and windows of held-out text end with
    fill: neither may change the results of earlier tokens. In training it does, so scores do not use a capacity."""
    model = model_with(replace(EXPERTS, capacity_factor=0.5))
    x = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    filled = torch.cat((x, x[:, -1:].expand(-1, 4)), dim=1)
    with torch.no_grad():
        assert close(model(filled)[:, :12], model(x))
        inputs = router_loss(dtype=torch.float64)
        assert not close(model(filled, router_loss=inputs)[:, :12], model(x, router_loss=inputs), 1e-3)


def model_with(settings: Settings, seed: int = 3) -> Transformer:
    arch = replace(ARCH, moe=settings)
    model = Transformer(arch).double()
    initialize(model, arch, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


@pytest.mark.parametrize("pieces", [[7, 1, 1, 1, 1, 1], [1] * 12, [5, 4, 3]], ids=str)
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_generation_with_a_cache_equals_an_uncached_forward(pieces, factor):
    model = model_with(replace(EXPERTS, capacity_factor=factor, first_dense=1))
    x = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = KVCache(model.arch, 12)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in x.split(pieces, dim=1)]
        assert close(torch.cat(parts, dim=1), model(x))


# --- training: noise, balance, counting ---


def router_loss(batch: int = BATCH, weight: float = 0.25, dtype=torch.float64) -> RouterLoss:
    return RouterLoss(torch.arange(100, 100 + batch), torch.tensor(weight, dtype=dtype))


def test_noise_is_standard_normal_and_finite_for_every_counter():
    noise = normal_noise(torch.arange(40), torch.arange(100), layer=3, experts=32)
    count = noise.numel()
    assert noise.isfinite().all()
    assert abs(float(noise.mean())) < 4 / math.sqrt(count)
    assert abs(float(noise.var()) - 1) < 4 * math.sqrt(2 / count)
    # The distribution function at a few places, and neighbors along each axis are strangers.
    for at in (-2.0, -1.0, 0.0, 0.5, 1.5):
        share = 0.5 * (1 + math.erf(at / math.sqrt(2)))
        assert abs(float((noise < at).double().mean()) - share) < 4 * math.sqrt(share * (1 - share) / count)
    for axis in range(3):
        a, b = noise.narrow(axis, 0, noise.shape[axis] - 1), noise.narrow(axis, 1, noise.shape[axis] - 1)
        assert abs(float((a * b).mean())) < 4 / math.sqrt(a.numel())


@pytest.mark.parametrize("ones", [-1, 0])
def test_the_outermost_noise_is_finite(ones, monkeypatch):
    monkeypatch.setattr("ingot.trainer.model.routing._mix", lambda x: torch.full_like(x, ones))
    value = float(normal_noise(torch.tensor([0]), torch.tensor([0]), 0, 1))
    assert 8 < abs(value) < 9


def test_noise_is_of_its_sequence_position_layer_and_expert_alone():
    keys, positions = torch.tensor([5, 9, 1 << 40]), torch.arange(10)
    noise = normal_noise(keys, positions, 2, 4)
    assert (noise[1:2, 3:6] == normal_noise(keys[1:2], positions[3:6], 2, 4)).all()
    every = torch.stack([noise, normal_noise(keys, positions, 3, 4), normal_noise(keys + 3, positions, 2, 4)])
    assert len(every.unique()) == every.numel(), "no number comes back at another expert, layer, position or sequence"


def test_noise_acts_in_training_only_and_moves_logits():
    noisy, x = layer(replace(EXPERTS, noise=2.0)), tokens()
    calm = layer(EXPERTS)
    assert close(run(noisy, x), run(calm, x), 1e-15)
    assert not close(run(noisy, x, router_loss()), run(calm, x, router_loss()), 1e-2)
    # Adding the noise to the logits by hand is the same.
    positions, seen = torch.arange(TOKENS), router_loss()
    logits = x @ noisy.router.weight.T + 2.0 * normal_noise(seen.keys_B, positions, 1, 6)
    routing = noisy.router(x, positions, seen)
    best = logits.topk(2, dim=-1)
    assert (routing.experts_MK == best.indices.flatten(0, 1)).all()
    assert close(routing.weights_MK, best.values.softmax(-1).flatten(0, 1))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "changes",
    [
        {"sequence_loss": 0.3},
        {"sequence_loss": 0.3, "bias_rate": 0.1},
        {"global_loss": 0.2},
        {"z_loss": 0.1},
        {"capacity_factor": 0.6},
    ],
    ids=str,
)
def test_balance_losses_by_their_formulas(changes, scores):
    """The gradient of y alone, plus weight x that of the loss: sum over tokens, E sum_e f_e P_e and logsumexp^2."""
    every = {"sequence_loss": 0.3, "global_loss": 0.2, "z_loss": 0.1}
    settings = replace(EXPERTS, scores=scores, **(every if "capacity_factor" in changes else {}) | changes)
    moe, x = layer(settings), tokens()
    ours = gradients(run(moe, x, router_loss(weight=0.25)), moe, x)
    logits = x @ moe.router.weight.T
    kinds = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    P_BTE = kinds / kinds.sum(-1, keepdim=True)
    loss = torch.zeros((), dtype=torch.float64)
    if settings.sequence_loss:
        ranked = kinds if moe.router.bias is None else kinds + moe.router.bias
        chosen_BTE = torch.zeros_like(P_BTE).scatter_(-1, ranked.topk(2).indices, 1.0)
        # The experts that the scores alone would choose have another load, so the case distinguishes the two.
        assert moe.router.bias is None or not torch.equal(ranked.topk(2).indices, kinds.topk(2).indices)
        f_BE = chosen_BTE.sum(1) / (2 * TOKENS)
        loss = loss + 0.3 * 6 * (f_BE * P_BTE.mean(1)).sum(-1).mean() * BATCH * TOKENS
    if moe.router.load is not None:
        f_E = moe.router.load / 6
        loss = loss + 0.2 * 6 * (f_E * P_BTE.mean((0, 1))).sum() * BATCH * TOKENS
    if settings.z_loss:
        loss = loss + 0.1 * logits.exp().sum(-1).log().square().sum()
    of_loss = torch.autograd.grad(0.25 * loss, [x, *moe.parameters()], allow_unused=True)
    silent = replace(settings, sequence_loss=0.0, global_loss=0.0, z_loss=0.0)
    without_loss = layer(silent)
    without_loss.load_state_dict({n: v for n, v in moe.state_dict().items() if n != "router.load"})
    alone_of = gradients(run(without_loss, x, router_loss()), without_loss, x)
    for mine, alone, more in zip(ours, alone_of, of_loss, strict=True):
        assert close(mine, alone if more is None else alone + more)


def test_what_is_counted():
    moe, x = layer(replace(EXPERTS, capacity_factor=0.5, noise=0.3)), tokens()
    y = run(moe, x, router_loss())
    assert moe.router.seen is None, "counted in the backward"
    y.sum().backward()
    first = moe.router.seen
    assert first is not None and first.dtype == torch.float64 and first.shape == (9,)
    logits = x @ moe.router.weight.T + 0.3 * normal_noise(router_loss().keys_B, torch.arange(TOKENS), 1, 6)
    p, chosen = logits.softmax(-1), logits.topk(2).indices
    assert first[:6].tolist() == torch.bincount(chosen.flatten(), minlength=6).tolist()
    # ceil(0.5 x 2 x 7 / 6) = 2 tokens of each sequence.
    over = [max(int((sequence == e).sum()) - 2, 0) for sequence in chosen for e in range(6)]
    assert first[6] == sum(over) > 0
    assert close(first[7], -(p * p.log()).sum())
    assert first[8] == BATCH * TOKENS
    run(moe, x, router_loss()).sum().backward()
    assert close(moe.router.seen, 2 * first)


def test_a_recomputed_block_counts_and_presses_once():
    settings = replace(EXPERTS, noise=0.3, sequence_loss=0.3, z_loss=0.1, capacity_factor=0.7)
    moe, x = layer(settings), tokens()
    plainly = gradients(run(moe, x, router_loss()), moe, x)
    seen, moe.router.seen = moe.router.seen, None
    y = checkpoint(run, moe, x, router_loss(), use_reentrant=False, preserve_rng_state=False)
    again = gradients(y, moe, x)
    assert torch.equal(moe.router.seen, seen)
    assert all(torch.equal(a, b) for a, b in zip(plainly, again, strict=True))


def test_evaluation_leaves_no_trace():
    moe, x = layer(replace(EXPERTS, noise=0.3, sequence_loss=0.3, global_loss=0.1, bias_rate=0.1)), tokens()
    before = {name: value.clone() for name, value in moe.state_dict().items()}
    run(moe, x).sum().backward()
    with torch.no_grad():
        run(moe, x)
    assert moe.router.seen is None
    assert all(torch.equal(before[name], value) for name, value in moe.state_dict().items())


def test_a_bias_alone_balances_a_skewed_router():
    """Tokens share a direction that one expert likes best: without biases it takes nearly all first choices."""
    settings = Settings(num_experts=8, top_k=2, d_expert=4, scores="sigmoid", bias_rate=0.02)
    moe = layer(settings)
    generator = torch.Generator().manual_seed(4)
    common = torch.randn(DIM, generator=generator, dtype=torch.float64)
    moe.router.bias.zero_()

    def loads() -> Tensor:
        x = common + 0.7 * torch.randn(16, 64, DIM, generator=generator, dtype=torch.float64)
        run(moe, x, router_loss(16)).sum().backward()
        seen, moe.router.seen = moe.router.seen, None
        return seen[:8]

    def variation(loads_E: Tensor) -> float:
        return float(loads_E.std(correction=0) / loads_E.mean())

    assert variation(loads()) > 1
    for _ in range(150):
        moe.router.bias.copy_(updated_biases(moe.router.bias[None], loads()[None], settings.bias_rate)[0])
    settled = torch.zeros(8, dtype=torch.float64)
    for _ in range(20):
        settled += (now := loads())
        moe.router.bias.copy_(updated_biases(moe.router.bias[None], now[None], settings.bias_rate / 10)[0])
    assert variation(settled) < 0.1


# --- dtypes ---


@pytest.mark.parametrize(
    "change, weight, buffers",
    [
        (lambda m: m.to(torch.bfloat16), torch.bfloat16, torch.float32),
        (lambda m: m.half(), torch.float16, torch.float32),
        (lambda m: m.double().bfloat16(), torch.bfloat16, torch.float32),
        (lambda m: m.double(), torch.float64, torch.float64),
    ],
)
def test_buffers_of_a_router_are_never_narrow(change, weight, buffers):
    """0.003 and 1.003 are no bfloat16 numbers, and few float16 ones are."""
    router = MoeLayer(replace(ARCH, moe=replace(EXPERTS, bias_rate=0.1, global_loss=0.1)), 1, LocalDispatch()).router
    router.bias.fill_(0.003)
    router.load.fill_(1.003)
    change(router)
    assert (router.weight.dtype, router.bias.dtype, router.load.dtype) == (weight, buffers, buffers)
    assert torch.equal(router.bias, torch.full((6,), 0.003).to(buffers))
    assert torch.equal(router.load, torch.full((6,), 1.003).to(buffers))
    assert sorted(dict(router.named_buffers())) == ["bias", "load"]


def test_buffers_without_memory_get_it_with_their_width():
    with torch.device("meta"):
        router = MoeLayer(replace(ARCH, moe=replace(EXPERTS, bias_rate=0.1)), 1, LocalDispatch()).router
    router.to(torch.bfloat16).to_empty(device="cpu")
    assert router.bias.dtype == torch.float32 and router.bias.device.type == "cpu"
    assert router.weight.dtype == torch.bfloat16


# --- products ---


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize(
    "dtype, inputs", [(torch.float32, 8), (torch.bfloat16, 8), (torch.float32, 6), (torch.float64, 8)]
)
def test_grouped_product(dtype, inputs, counts):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), inputs, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 16, inputs, generator=generator).to(dtype).requires_grad_()
    assert _kernel_takes(rows, weight) == (dtype != torch.float64 and inputs == 8 and sum(counts) > 0)
    ours = grouped_product(rows, weight, ExpertCounts(torch.tensor(counts), sum(counts)))
    experts = torch.arange(4).repeat_interleave(torch.tensor(counts))
    theirs = torch.einsum("ri,roi->ro", rows, weight[experts])
    assert ours.shape == theirs.shape and ours.dtype == dtype
    slope = torch.randn(ours.shape, generator=generator).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for mine, reference in zip(
        torch.autograd.grad(ours, (rows, weight), slope),
        torch.autograd.grad(theirs, (rows, weight), slope),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)


class Careless(torch.autograd.Function):
    """A grouped product whose backward writes nothing for experts without rows, as PyTorch's on Blackwell."""

    @staticmethod
    def forward(ctx, rows, weights_EIO, offsets):
        ctx.save_for_backward(rows, weights_EIO, offsets)
        experts = torch.searchsorted(offsets, torch.arange(len(rows)), right=True)
        return torch.einsum("ri,rio->ro", rows, weights_EIO[experts])

    @staticmethod
    def backward(ctx, grad):
        rows, weights_EIO, offsets = ctx.saved_tensors
        found, start = torch.full_like(weights_EIO, torch.nan), 0
        for expert, end in enumerate(offsets.tolist()):
            if end > start:
                found[expert] = rows[start:end].T @ grad[start:end]
            start = end
        return None, found, None


@pytest.mark.parametrize("known", [None, [0, 4, 0, 2]])
def test_an_expert_without_rows_has_no_gradient_whatever_the_kernel_leaves(monkeypatch, known):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 8, generator=generator)
    weight = torch.randn(4 * 16, 8, generator=generator).requires_grad_()
    slope, counts = torch.randn(6, 16, generator=generator), torch.tensor([0, 4, 0, 2])

    def gradient() -> Tensor:
        product = grouped_product(rows, weight.view(4, 16, 8), ExpertCounts(counts, 6, known))
        return torch.autograd.grad(product, weight, slope)[0]

    right = gradient()
    monkeypatch.setattr("ingot.trainer.model.experts.F.grouped_mm", lambda a, b, offs: Careless.apply(a, b, offs))
    monkeypatch.setattr(experts, "leaves_idle_gradients", lambda device: True)
    torch.testing.assert_close(gradient(), right)


def test_a_part_of_a_buffer_that_is_not_aligned_takes_the_loop():
    buffer = torch.randn(1 + 2 * 4 * 8)
    weight, rows = buffer[1:].view(2, 4, 8), torch.randn(3, 8)
    assert not _kernel_takes(rows, weight)
    product = grouped_product(rows, weight, ExpertCounts(torch.tensor([0, 3]), 3))
    torch.testing.assert_close(product, rows @ weight[1].T)


# --- first values ---


def test_first_values_of_experts_routers_and_buffers():
    arch = replace(ARCH, d_model=64, moe=Settings(num_experts=64, d_expert=32, bias_rate=0.1, global_loss=0.1))
    model = Transformer(arch)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(7.0)
    initialize(model, arch, 1)
    moe = model.blocks["1"].moe
    assert moe.router.bias.tolist() == [0.0] * 64 and moe.router.load.tolist() == [1.0] * 64
    for weight, deviation in (
        (moe.router.weight, 0.02),
        (moe.experts.gate.weight, 0.02),
        (moe.experts.up.weight, 0.02),
        (moe.experts.down.weight, 0.02 / math.sqrt(2 * arch.num_layers)),
    ):
        assert abs(float(weight.detach().std()) / deviation - 1) < 0.05
    # A rank's experts are drawn separately, with the bits that they have in the whole.
    name = "blocks.1.moe.experts.down.weight"
    part = initial_value(name, (64 * 64, 32), arch, 1, (48 * 64, 0), (16 * 64, 32))
    assert torch.equal(part, moe.experts.down.weight[48 * 64 :])
