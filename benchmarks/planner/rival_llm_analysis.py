"""llm-analysis on rows from standard input, in its own environment; prints {id: {step_seconds, memory_bytes}}.

Everything is passed as its documentation asks; where it has no notion (context parallelism, pipelines' bubbles) it is
given the nearest thing that it takes: ranks of context parallelism count as data-parallel ones with shorter sequences.
"""

import contextlib
import io
import json
import logging
import sys

from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig
from llm_analysis.logger import logger

EFFICIENCY = 0.5  # "typically around 0.5 for large models" in its README
RECOMPUTE = {"none": 0, "selective": 1, "full": 2}


def predict(row: dict) -> dict:
    bits = 8 if row["low"] else 16
    analysis = LLMAnalysis(
        ModelConfig(
            name=row["id"],
            num_layers=row["layers"],
            n_head=row["heads"],
            hidden_dim=row["width"],
            vocab_size=row["vocabulary"],
            max_seq_len=row["seq_len"],
            num_key_value_heads=row["kv_heads"],
            ffn_embed_dim=round(row["ffn"]),
            expansion_ratio=row["ffn"] / row["width"],
            moe_num_experts=row["experts"],
            moe_top_k=row["top_k"],
        ),
        GPUConfig(
            name="device",
            mem_per_GPU_in_GB=row["memory_bytes"] / 1e9,
            hbm_bandwidth_in_GB_per_sec=row["memory_bandwidth"] / 1e9,
            intra_node_bandwidth_in_GB_per_sec=row["link"] / 1e9,
            intra_node_min_message_latency=8e-6,
            peak_fp16_TFLOPS=row["peak"] / 1e12,
            inter_node_bandwidth_in_GB_per_sec=row["network"] / 1e9,
        ),
        DtypeConfig(name="given", weight_bits=bits, activation_bits=bits, embedding_bits=16),
        ParallelismConfig(
            tp_size=row["tp"],
            pp_size=row["pp"],
            dp_size=row["dp"] * row["cp"],
            ep_size=row["ep"],
            sp_size=row["tp"] if row["sequence"] else 1,
        ),
        flops_efficiency=EFFICIENCY,
    )
    found = analysis.training(
        batch_size_per_gpu=row["micro_batch"],
        gradient_accumulation_steps=row["accumulation"],
        global_batch_size=row["global_batch"] * row["cp"],
        seq_len=row["seq_len"] // row["cp"],
        activation_recomputation=ActivationRecomputation(RECOMPUTE[row["recompute"]]),
        ds_zero=DSZeRO(row["zero"]),
        flash_attn=row["flash"],
    )
    return {
        "step_seconds": found["latency_per_iter"] * row["scale"],
        "memory_bytes": found["(weight+op_state+grad+act)_memory_per_gpu"],
    }


def main() -> None:
    logger.setLevel(logging.CRITICAL)
    answers, refused = {}, 0
    for row in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                answers[row["id"]] = predict(row)
        except Exception as error:  # whatever it raises is its answer to this row
            refused += 1
            print(f"{row['id']}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{refused} rows refused", file=sys.stderr)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
