"""The steps that are measured next to each other on one device: ingot's, and the same model from other projects.

Each computes in bf16 over float32 masters, with fused AdamW and clipping, on the same random batch. Their packages are
imported by the process that measures them; a package that is not installed is an ImportError.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.schema.run import RunConfig
from ingot.trainer.build import build_parts
from ingot.trainer.loader.loader import Batch
from ingot.trainer.mesh.start import start, stop
from ingot.trainer.step import train_step

WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 5, 5, 4
Step = Callable[[], Tensor]


def batch_of(run: RunConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return one random batch: inputs and targets, [B, T] each."""
    shape = (run.train.micro_batch, run.train.seq_len + 1)
    ids = torch.randint(0, run.model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def documents_of(run: RunConfig, mean_tokens: int) -> Tensor:
    """Return the number of each token's document within its sequence, int32 [B, T], on the host: every token begins a
    new document with the same probability."""
    shape = (run.train.micro_batch, run.train.seq_len)
    begins = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 1 / mean_tokens
    return begins.cumsum(-1).int()


def ingot_step(run: RunConfig, device: torch.device, document_tokens: int = 0) -> Step:
    parts = build_parts(run, device, Path())
    inputs, targets = batch_of(run, device)
    documents = documents_of(run, document_tokens)[None] if document_tokens else None
    batch = Batch(1, np.zeros(0, np.int64), inputs[None], targets[None], documents, 0.0)
    return lambda: train_step(parts, batch, run.optim.lr).loss


def transformers_step(run: RunConfig, device: torch.device) -> Step:
    """The step of a careful user: autocast over float32 weights, the whole model compiled, fused AdamW."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arch, kind, more = run.model, "llama", {}
    if arch.is_moe:
        moe, kind = arch.moe, "qwen3_moe"
        more = {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.d_expert,
            "norm_topk_prob": moe.normalize,
        }
    elif arch.qk_norm:
        kind = "qwen3"
    config = AutoConfig.for_model(
        kind,
        vocab_size=arch.vocab_size,
        hidden_size=arch.d_model,
        intermediate_size=arch.d_ffn,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads,
        num_key_value_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        max_position_embeddings=arch.max_seq_len,
        rms_norm_eps=arch.norm_eps,
        tie_word_embeddings=arch.tied_embeddings,
        use_cache=False,
        **more,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    inputs, targets = batch_of(run, device)
    compiled = torch.compile(model) if device.type == "cuda" else model

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(input_ids=inputs).logits
            return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return _plain_step(run, model, loss)


def torchtitan_step(run: RunConfig, device: torch.device) -> Step:
    """The Llama of torchtitan 0.3 as its `parallelize_llama` prepares it: each block compiled, then FSDP2 (of one rank)
    for bf16 over float32 masters. Attention is FlexAttention with a causal mask, the default of its Llama."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import create_attention_mask, get_causal_mask_mod

    arch, seq_len = run.model, run.train.seq_len
    width, words, init = arch.d_model, arch.vocab_size, {"weight": torch.nn.init.normal_, "bias": torch.nn.init.zeros_}
    rope = ComplexRoPE.Config(dim=arch.head_dim, max_seq_len=seq_len, theta=arch.rope_theta, scaling="none")
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=words,
        tok_embeddings=Embedding.Config(num_embeddings=words, embedding_dim=width, param_init=init),
        norm=RMSNorm.Config(normalized_shape=width, param_init={"weight": torch.nn.init.ones_}),
        lm_head=Linear.Config(in_features=width, out_features=words, param_init=init),
        layers=llama3._build_llama3_layers(
            n_layers=arch.num_layers,
            dim=width,
            n_heads=arch.num_heads,
            n_kv_heads=arch.num_kv_heads,
            hidden_dim=arch.d_ffn,
            rope=rope,
            attn_backend="flex",
        ),
    )
    with torch.device("meta"):
        model = config.build()
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.layers.values():
        if device.type == "cuda":
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=device)
    inputs, targets = batch_of(run, device)
    mask = create_attention_mask(get_causal_mask_mod(), None, None, seq_len, seq_len, device=device)

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    judged = torch.compile(cross_entropy) if device.type == "cuda" else cross_entropy
    return _plain_step(run, model, lambda: judged(model(inputs, attention_masks=mask), targets))


def _plain_step(run: RunConfig, model: torch.nn.Module, loss: Callable[[], Tensor]) -> Step:
    optim = run.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay, fused=True
    )

    def step() -> Tensor:
        found = loss()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return step


CONTESTANTS: dict[str, Callable[..., Step]] = {
    "ingot": ingot_step,
    "transformers": transformers_step,
    "torchtitan": torchtitan_step,
}


def measure(name: str, run: RunConfig, document_tokens: int, *, smoke: bool) -> dict[str, Any]:
    """Return seconds per step (median of blocks), seconds of compilation and warm-up, peak bytes and the last loss."""
    device = start("cpu" if smoke else "cuda", 600).device
    warm_up, blocks, steps = (1, 1, 1) if smoke else (WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK)

    def finish() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    more = {"document_tokens": document_tokens} if document_tokens else {}
    step = CONTESTANTS[name](run, device, **more)
    began = time.perf_counter()
    for _ in range(warm_up):
        loss = step()
    warm_up_seconds, seconds = finish() - began, []
    for _ in range(blocks):
        began = time.perf_counter()
        for _ in range(steps):
            loss = step()
        seconds.append((finish() - began) / steps)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    found = {
        "step_seconds": statistics.median(seconds),
        "warm_up_seconds": warm_up_seconds,
        "peak_memory_bytes": peak,
        "last_loss": float(loss),
    }
    stop()
    return found
