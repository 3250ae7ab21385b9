"""Training speed on one GPU: ingot's step, and the same model from `transformers` with torch.compile.

Both train in bf16 with float32 master weights, SDPA attention, fused AdamW and clipping, on the same random batch; each
contestant has a process of its own and they take turns. Printed and written to results/train_gpu.json: tokens/s, MFU
(norm convention: matmul parameters x 6 plus the causal half of attention, against the published dense bf16 peak) and
peak memory as the allocator counts it.

    python benchmarks/train_gpu.py [--model qwen3-0.6b] [--seq-len 4096] [--micro-batch 4] [--rounds 2]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 5, 5, 4


def benchmark_run(args: argparse.Namespace):
    from dataclasses import replace

    from ingot.planner.request.presets import load_model
    from ingot.schema.run import Data, RunConfig, Train

    arch = load_model(args.model).arch
    return RunConfig(
        name="benchmark",
        model=replace(arch, max_seq_len=max(arch.max_seq_len, args.seq_len)),
        data=Data(tokens=""),
        train=Train(
            steps=1, seq_len=args.seq_len, global_batch=args.micro_batch, micro_batch=args.micro_batch, device="cuda"
        ),
    )


def batch_of(run, device):
    """One random batch: inputs and targets, [B, T] each."""
    import torch

    shape = (run.train.micro_batch, run.train.seq_len + 1)
    ids = torch.randint(0, run.model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def ingot_step(run, device) -> Callable[[], Any]:
    from pathlib import Path

    import numpy as np

    from ingot.trainer.build import build_parts
    from ingot.trainer.loader.loader import Batch
    from ingot.trainer.step import train_step

    parts = build_parts(run, device, Path())
    inputs, targets = batch_of(run, device)
    batch = Batch(1, np.zeros(0, np.int64), inputs[None], targets[None], None, 0.0)
    return lambda: train_step(parts, batch, run.optim.lr).loss


def transformers_step(run, device) -> Callable[[], Any]:
    """The step of a careful user: autocast over float32 weights, the whole model compiled, fused AdamW."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    arch = run.model
    config = AutoConfig.for_model(
        "qwen3" if arch.qk_norm else "llama",
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
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    optim = run.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay, fused=True
    )
    inputs, targets = batch_of(run, device)
    compiled = torch.compile(model) if device.type == "cuda" else model

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(input_ids=inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


CONTESTANTS = {"ingot": ingot_step, "transformers": transformers_step}


def measure(name: str, args: argparse.Namespace) -> dict:
    """Seconds per step (median of blocks), compile and warm-up seconds, peak bytes and the last loss."""
    import torch

    from ingot.trainer.mesh.start import start, stop

    device = start("cuda", 600).device
    step = CONTESTANTS[name](benchmark_run(args), device)
    began = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        loss = step()
    torch.cuda.synchronize()
    warm_up_seconds = time.perf_counter() - began
    seconds = []
    for _ in range(BLOCKS):
        began = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            loss = step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / STEPS_PER_BLOCK)
    found = {
        "step_seconds": statistics.median(seconds),
        "warm_up_seconds": warm_up_seconds,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        "last_loss": float(loss),
    }
    stop()
    return found


def measure_in_a_process(name: str, args: argparse.Namespace) -> dict:
    options = ["--model", args.model, "--seq-len", str(args.seq_len), "--micro-batch", str(args.micro_batch)]
    done = subprocess.run(
        [sys.executable, __file__, *options, "--role", name], stdout=subprocess.PIPE, text=True, timeout=1200
    )
    if done.returncode:
        return {"error": f"exit code {done.returncode}; its message is above (out of memory: lower --micro-batch)"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def summarise(runs: list[dict], run, peak: float | None) -> dict:
    from ingot.theory.flops import model_flops_utilization, train_flops_per_token

    good = [r for r in runs if "error" not in r]
    if not good:
        return runs[0]
    step_seconds = statistics.median(r["step_seconds"] for r in good)
    rate = run.tokens_per_step / step_seconds
    flops = train_flops_per_token(run.model, run.train.seq_len)
    return {
        "step_seconds": step_seconds,
        "tokens_per_second": rate,
        "mfu_norm": peak and model_flops_utilization(rate, flops, peak),
        "peak_memory_gib": max(r["peak_memory_bytes"] for r in good) / 2**30,
        "warm_up_seconds": good[0]["warm_up_seconds"],
        "last_loss": good[-1]["last_loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="model preset (default: qwen3-0.6b)")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens per sequence (default: 4096)")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences per step (default: 4)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each contestant (default: 2)")
    parser.add_argument("--role", choices=tuple(CONTESTANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("train_gpu.py measures a CUDA GPU, and torch sees none here; nothing was measured")
    if args.role:
        print(json.dumps(measure(args.role, args)))
        return
    from record import record

    from ingot.theory.devices import peak_flops
    from ingot.theory.params import count_parameters

    run, gpu = benchmark_run(args), torch.cuda.get_device_name()
    runs: dict[str, list[dict]] = {name: [] for name in CONTESTANTS}
    for _ in range(args.rounds):
        for name in CONTESTANTS:
            runs[name].append(measure_in_a_process(name, args))
    results = {name: summarise(found, run, peak_flops(gpu, "bf16")) for name, found in runs.items()}
    facts = {
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "model": args.model,
        "parameters": count_parameters(run.model),
        "seq_len": args.seq_len,
        "micro_batch": args.micro_batch,
        "peak_flops": peak_flops(gpu, "bf16"),
        "mfu_convention": "norm: matmul parameters x 6 + causal half of attention, dense bf16 peak",
    }
    for name, found in results.items():
        if "error" in found:
            print(f"{name:13} {found['error']}")
            continue
        mfu = "n/a" if found["mfu_norm"] is None else f"{found['mfu_norm']:.1%}"
        print(f"{name:13} {found['tokens_per_second']:9,.0f} tokens/s  MFU {mfu}  {found['peak_memory_gib']:.1f} GiB")
    print(record("train_gpu", facts | {"contestants": results}, ("torch", "transformers")))


if __name__ == "__main__":
    main()
