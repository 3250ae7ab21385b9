"""calculon on rows from standard input, from a folder with its sources; prints {id: {step_seconds, memory_bytes}}.

    python benchmarks/planner/rival_calculon.py FOLDER < rows.json

FOLDER holds its package `calculon` and its `systems`, whose descriptions of A100 and H100 are taken as they ship, save
the memory, which is made endless: a row that it thinks too large is predicted too. Rows that it has no notion of are
refused with the reason. Fused attention counts as its unfused one.
"""

import json
import logging
import sys
from pathlib import Path

SYSTEMS = {"a100": "a100_80g.json", "h100": "h100_80g_nvl8.json"}
RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}
NODE = 8  # devices of its first network
ENDLESS_GIB = 10**6


def refusal(row: dict) -> str:
    """Return the reasons why Calculon cannot express this row, or ""."""
    reasons = {
        "device": row["device"].split("-")[0] not in SYSTEMS,
        "schedule": row["schedule"] not in ("1f1b", "interleaved"),
        "precision": row["low"],
        "experts": row["experts"] > 1,
        "context parallelism": row["cp"] > 1,
        "grouped queries": row["kv_heads"] != row["heads"],
        "gated MLP": row["gated"],
        "sharded parameters or gradients": row["zero"] not in (0, 1),
        "recomputation": row["recompute"] not in RECOMPUTE,
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def predict(row: dict, folder: Path) -> dict:
    from calculon import System
    from calculon.llm import Llm

    tp, pp, dp = row["tp"], row["pp"], row["dp"]
    system = json.loads((folder / "systems" / SYSTEMS[row["device"].split("-")[0]]).read_text())
    system["mem1"]["GiB"] = ENDLESS_GIB
    full = row["recompute"] == "full"
    sequence = row["sequence"] and tp > 1
    app = Llm.Application(
        {
            "hidden": row["width"],
            "feedforward": round(row["ffn"]),
            "seq_size": row["seq_len"],
            "attn_heads": row["heads"],
            "attn_size": row["width"] // row["heads"],
            "num_blocks": row["layers"],
        }
    )
    execution = Llm.Execution.from_json(
        {
            "num_procs": tp * pp * dp,
            "tensor_par": tp,
            "pipeline_par": pp,
            "data_par": dp,
            "tensor_par_net": int(tp > NODE),
            "data_par_net": int(tp * dp > NODE),  # ranks in Megatron's order: tensor, data, pipeline
            "pipeline_par_net": int(tp * dp * pp > NODE),
            "batch_size": row["global_batch"],
            "microbatch_size": row["micro_batch"],
            "datatype": "float16",
            "fused_activation": True,
            "attention_type": "multihead",
            "activation_recompute": RECOMPUTE[row["recompute"]],
            "pipeline_interleaving": row["interleaving"],
            "optimizer_sharding": row["zero"] == 1 and dp > 1,
            "tensor_par_comm_type": "rs_ag" if sequence else "ar",
            "tensor_par_overlap": "ring" if row["overlap_tensor"] and tp > 1 else "none",
            "seq_par_ag_redo": sequence and not full,
            "data_par_overlap": row["overlap_data"] and dp > 1,
            "weight_offload": False,
            "activations_offload": False,
            "optimizer_offload": False,
            "training": True,
        }
    )
    model, machine = Llm(app, logging.getLogger("calculon")), System(system)
    model.compile(machine, execution)
    model.run(machine)
    return {"step_seconds": model.get_total_time() * row["scale"], "memory_bytes": model.get_mem_tier1_cap_req()}


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    answers = {}
    for row in json.load(sys.stdin):
        reason = refusal(row)
        if not reason:
            try:
                answers[row["id"]] = predict(row, folder)
                continue
            except Exception as error:  # whatever it raises is its answer to this row
                reason = f"{type(error).__name__}: {error}"
        print(f"{row['id']}: {reason}", file=sys.stderr)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
