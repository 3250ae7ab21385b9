"""Published runs expressed in ingot's terms: shape, hardware, software, layout. Rows are written here by hand."""

import pytest

from ingot.planner.published.layout import batch_of, cluster_for, degrees_of, devices_of, known_device, slices_of
from ingot.planner.published.row import PublishedRow
from ingot.planner.published.run import PublishedRun, SkippedRow, published_run
from ingot.planner.published.shape import arch_of, sequence_of
from ingot.planner.published.software import software_of
from ingot.theory.flops import mean_keys, train_flops_per_token
from ingot.theory.params import count_parameters

LLAMA = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "seq": 8192}
H100 = {"gpu": "H100", "n_gpus": 64, "gpus_per_node": 8, "peak_tflops": 989, "intra_bw": 450, "inter_bw": 50}


def row(**values) -> PublishedRow:
    merged = {"model": LLAMA, "cluster": H100, "plan": {"dp": 64, "fsdp_zero": 3}, "measured": {"step_s": 1.0}} | values
    return PublishedRow(values.get("id", "a-run"), "someone", merged)


def run_of(**values) -> PublishedRun:
    found = published_run(row(**values))
    assert isinstance(found, PublishedRun), found
    return found


def test_parameters_of_a_given_shape():
    assert count_parameters(run_of().run.model) == pytest.approx(8.03e9, rel=0.002)


def test_feed_forwards_without_a_gate_have_two_matrices():
    gelu = {"layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "vocab": 51200, "seq": 2048, "act": "gelu"}
    arch = arch_of(row(model=gelu | {"tied_embeddings": True}), [])
    assert arch is not None
    assert count_parameters(arch) == pytest.approx(174.6e9, rel=0.005)
    # Narayanan et al. 2021, eq. 3 without its recomputed forward: 72 B s l h^2 (1 + s/6h + V/12lh).
    layers, width, seq, vocab = 96, 12288, 2048, 51200
    paper = 72 * layers * width**2 * (1 + seq / (6 * width) + vocab / (12 * layers * width))
    assert train_flops_per_token(arch, seq, causal=False) == pytest.approx(paper, rel=0.001)


def test_experts_latents_and_a_second_prediction():
    moe = {"experts": 256, "topk": 8, "shared": 1, "expert_ffn": 2048, "dense_layers": 3}
    deepseek = {"layers": 61, "hidden": 7168, "ffn": 18432, "heads": 128, "vocab": 129280, "seq": 4096, "moe": moe}
    plain = arch_of(row(model=deepseek | {"attention": "MLA"}), [])
    assert plain is not None
    assert count_parameters(plain) == pytest.approx(671e9, rel=0.005)
    more = arch_of(row(model=deepseek | {"attention": "MLA", "mtp": True}), [])
    assert more is not None
    assert (more.num_layers, more.head_passes) == (62, 2)
    head = 6 * more.vocab_size * more.d_model
    block = train_flops_per_token(more, 4096) - train_flops_per_token(plain, 4096) - head
    assert 0 < block < train_flops_per_token(plain, 4096) / 50


def test_windows_on_alternate_layers_keep_the_keys_that_are_seen():
    arch = arch_of(row(model=LLAMA | {"seq": 4096}, note="Sliding-window attention on alternate layers."), [])
    assert arch is not None
    half = (mean_keys(4096, 128) + mean_keys(4096)) / 2
    assert mean_keys(4096, arch.sliding_window) == pytest.approx(half, rel=0.001)


def test_a_shape_from_its_size_alone():
    arch = arch_of(row(model={"params": 64e9}), [])
    assert arch is not None and count_parameters(arch) == pytest.approx(64e9, rel=0.05)
    assert arch_of(row(model={"name": "secret"}), []) is None
    assert sequence_of(row(model={}, source="someone 2021")) == 2048
    assert sequence_of(row(model={}, source="someone 2024")) == 8192


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("A100-80", "a100"), ("A100-40", "a100-40"), ("H100", "h100"), ("H100-HBM2e-96-500W", "h100-96"),
        ("TPUv4", "tpu-v4"), ("TPU v5e", "tpu-v5e"), ("GB200", "gb200"), ("MI250", "mi250x"),
    ],
)  # fmt: skip
def test_devices_by_what_people_call_them(name, key):
    device = known_device(name)
    assert device is not None and device.key == key


def test_hardware_as_the_row_states_it():
    cluster = cluster_for(row(cluster=H100 | {"peak_tflops": 900, "inter_bw": 12.5}, note="RoCE"), 64, [])
    assert cluster is not None
    assert (cluster.nodes, cluster.devices_per_node) == (8, 8)
    assert cluster.peak_flops["bf16"] == 900e12
    assert (cluster.network_bandwidth, cluster.network_kind) == (12.5e9, "ethernet")


def test_unknown_hardware_needs_a_peak():
    notes = []
    cluster = cluster_for(row(cluster={"gpu": "Cerberus 9", "peak_tflops": 500}), 8, notes)
    assert cluster is not None and cluster.memory_bandwidth == pytest.approx(2.5e12)
    assert "unknown" in notes[0]
    assert cluster_for(row(cluster={"gpu": "Cerberus 9"}), 8, []) is None


def test_slices_of_tpus_are_domains():
    tpus = row(cluster={"gpu": "TPUv5e", "n_gpus": 1024}, note="4 slices")
    assert slices_of(tpus) == 4
    cluster = cluster_for(tpus, 1024, [])
    assert cluster is not None and cluster.domain == 256
    assert slices_of(row(note="4 slices")) == 1


def test_device_hours_without_a_number_of_devices():
    hours = row(cluster={"gpu": "A100-80"}, measured={"gpu_hours": 184320, "tokens": 2e12})
    assert devices_of(hours, []) == 256  # 720 hours with 256
    assert devices_of(row(cluster={"gpu": "A100-80"}), []) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"note": "eager"}, {"kernels": "eager"}),
        ({"note": "compile, async TP"}, {"kernels": "compiled", "overlap_tensor": True}),
        ({"note": "compile, vanilla TP", "source": "async TP benchmark"}, {"overlap_tensor": False}),
        ({"source": "NVIDIA/NeMo performance summary 24.07"}, {"kernels": "tuned", "overlap_tensor": True}),
        ({"source": "Megatron-LM 2021", "plan": {"tp": 8}}, {"attention": "unfused", "overlap_data": False}),
        ({"source": "Megatron-LM 2021", "note": "flash attention"}, {"attention": "flash"}),
        ({"table": "DeepSeekV3 (tokendrop)"}, {"dropless": False}),
        ({"note": "dropless unless '(tokendrop)': DeepSeekV3"}, {"dropless": True}),
        ({"plan": {"precision": "fp8-rowwise"}}, {"recipe": "rowwise"}),
        ({"plan": {"precision": "fp8-mx"}}, {"recipe": "mxfp8"}),
        ({"plan": {"precision": "fp8(linear)"}}, {"recipe": "tensorwise"}),
        ({"plan": {"precision": "bf16"}}, {"recipe": ""}),
    ],
)
def test_software_from_what_a_source_says(values, expected):
    software, why = software_of(row(**values))
    assert {name: getattr(software, name) for name in expected} == expected
    assert why


def test_no_rule_of_software_names_a_family():
    """A family that nobody has seen has to get its properties by the same words."""
    stated = {"source": "NVIDIA/NeMo performance summary 24.07", "plan": {"precision": "fp8", "tp": 4}}
    one = PublishedRow("x", "nemo", row(**stated).values)
    other = PublishedRow("y", "somewhere_else", row(**stated).values)
    assert software_of(one)[0] == software_of(other)[0]


def test_degrees_multiply_to_the_devices():
    notes = []
    plan = {"dp": 2, "tp": 4, "pp": 2, "cp": 1}
    arch = run_of().run.model
    cluster = run_of().cluster
    degrees = degrees_of(row(plan=plan), arch, cluster, 64, notes)
    assert (degrees.dp, degrees.tp, degrees.pp) == (8, 4, 2)
    assert "dp 8 instead of 2" in notes[0]


def test_micro_batches_that_nobody_states():
    arch, cluster = run_of().run.model, run_of().cluster
    wide = row(plan={"dp": 64, "global_batch": 512}, model=LLAMA | {"seq": 2048})
    assert batch_of(wide, 2048, degrees_of(wide, arch, cluster, 64, []), []) == (512, 4)
    piped = row(plan={"dp": 8, "pp": 8, "global_batch": 512})
    assert batch_of(piped, 2048, degrees_of(piped, arch, cluster, 64, []), []) == (512, 1)


def test_a_batch_that_does_not_divide_is_scaled():
    found = run_of(plan={"dp": 64, "global_batch": 100, "micro_batch": 1})
    assert found.run.train.global_batch == 128
    assert found.tokens == pytest.approx(100 * 8192)


@pytest.mark.parametrize(
    ("plan", "schedule", "each"),
    [
        ({"pp": 4, "vpp": 4, "global_batch": 64}, "interleaved", 4),
        ({"pp": 4, "schedule": "1f1b", "global_batch": 64}, "1f1b", 0),
        ({"pp": 4, "schedule": "ZB-2p", "global_batch": 64}, "zb_2p", 0),
        ({"pp": 4, "schedule": "interleaved", "global_batch": 64}, "interleaved", 2),
        ({"pp": 4, "vpp": 4, "global_batch": 80}, "1f1b", 0),  # 5 micro-batches are not a multiple of 4 ranks
    ],
)
def test_schedules_by_their_published_names(plan, schedule, each):
    parallel = run_of(plan={"dp": 16, "micro_batch": 1} | plan).run.parallel
    assert (parallel.schedule, parallel.stages_per_rank) == (schedule, each)


def test_forms_of_data_parallelism():
    replicated = run_of(plan={"dp": 64, "fsdp_zero": 0}).run.parallel
    assert (replicated.dp_replicate, replicated.dp_shard) == (64, 1)
    sharded = run_of(plan={"dp": 64, "fsdp_zero": 3}).run.parallel
    assert (sharded.dp_replicate, sharded.dp_shard, sharded.zero) == (1, 64, 3)
    tpus = {"gpu": "TPUv4", "n_gpus": 512}
    within = run_of(cluster=tpus, plan={"dp": 512, "fsdp_zero": 3}, note="2 pods").run.parallel
    assert (within.dp_replicate, within.dp_shard) == (2, 256)


def test_one_layer_alone_has_no_head():
    model = LLAMA | {"layers": 1, "name": "Llama (one layer)"}
    found = run_of(model=model, plan={"tp": 8, "global_batch": 4, "micro_batch": 4}, cluster=H100 | {"n_gpus": 8})
    assert found.run.model.vocab_size == 8
    assert found.tokens * found.run.model.num_layers == pytest.approx(4 * 8192)
    assert found.scale < 0.01


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": None}, "neither layers and width"),
        ({"cluster": {"gpu": "H100"}}, "neither a number of devices"),
        ({"cluster": {"gpu": "abacus", "n_gpus": 8}}, "unknown"),
        ({"model": {"params": 10}}, "cannot be read"),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(values, reason):
    found = published_run(row(**values))
    assert isinstance(found, SkippedRow) and reason in found.reason


def test_nvidias_tables_sum_gradients_in_bf16_and_make_parts_of_blocks_again_where_they_would_not_fit():
    nvidia = {"source": "NVIDIA-NeMo/Megatron-Bridge performance summary", "note": "NeMo container 25.09."}
    plan = {"dp": 8, "tp": 8, "fsdp_zero": 1, "global_batch": 512, "precision": "fp8"}
    roomy, full = (run_of(**nvidia, plan=plan | {"micro_batch": size}) for size in (4, 32))
    assert roomy.run.parallel.grads == "bf16" and run_of().run.parallel.grads == "fp32"
    assert (roomy.software.parts_recomputed, full.software.parts_recomputed) == (False, True)
    assert any("are recomputed" in note for note in full.notes) and roomy.notes == ()
    stated = run_of(**nvidia, plan=plan | {"micro_batch": 32, "recompute": "none"})
    assert not stated.software.parts_recomputed
