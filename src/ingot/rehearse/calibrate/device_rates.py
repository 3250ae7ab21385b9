"""The rates of one device, each measured by itself: products, attention, memory traffic, launches."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ingot.theory.devices import peak_flops


def measure_gpu(device: torch.device) -> dict:
    """Fields of a Cluster for a CUDA device. Efficiencies are shares of the published peak, where there is one."""
    rates = measure_device(device, torch.bfloat16, width=8192, heads=32, seq_len=8192)
    free, total = torch.cuda.mem_get_info(device)
    # Context, libraries and workspaces: what is taken besides the tensors' own pool.
    runtime = (total - free) - torch.cuda.memory_reserved(device)
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name, "bf16")
    reference = peak or rates["matmul"]
    return {
        "device_name": name,
        "memory_bytes": total,
        "peak_flops": {"bf16": reference},
        "matmul_efficiency": rates["matmul"] / reference,
        "attention_efficiency": rates["attention"] / reference,
        "memory_bandwidth": rates["bandwidth"],
        "op_seconds": rates["op_seconds"],
        "runtime_bytes": runtime,
    }


def measure_device(
    device: torch.device, dtype: torch.dtype, *, width: int, heads: int, seq_len: int
) -> dict[str, float]:
    """matmul and attention in FLOP/s (forward and backward, causal half), bandwidth in bytes/s, op_seconds."""
    a = torch.randn(width, width, device=device, dtype=dtype)
    seconds = typical_seconds(lambda: a @ a, device)
    rates = {"matmul": 2.0 * width**3 / seconds}

    q, k, v = (torch.randn(1, heads, seq_len, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    # 7 products of 2·T²·H per head forward and backward (Dao 2023, section 3.1.2), of which causality needs half.
    rates["attention"] = 3.5 * heads * 2 * seq_len**2 * 128 / typical_seconds(attend, device)

    b = torch.empty_like(a)
    rates["bandwidth"] = 2.0 * a.numel() * a.element_size() / typical_seconds(lambda: b.copy_(a), device)

    small = torch.zeros(8, device=device)
    count = 200

    def launch_many() -> None:
        for _ in range(count):
            small.add_(1.0)

    rates["op_seconds"] = typical_seconds(launch_many, device) / count
    return rates


def typical_seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Median time of `work`, finished on the device, after two runs to warm up."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(repeats + 2):
        finish()
        began = time.perf_counter()
        work()
        finish()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[2:])[repeats // 2]
