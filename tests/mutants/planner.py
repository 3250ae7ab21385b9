"""Faults in the planner and in the formulas: parameters, FLOPs, memory, traffic, failures, price."""

from .mutant import Mutant

MUTANTS: list[Mutant] = [
    Mutant(
        name="parameters-of-norms",
        what="QK-norm counts one weight vector per block, not one for queries and one for keys",
        file="theory/params.py",
        before="heads = 2 * arch.head_dim if arch.qk_norm else 0",
        after="heads = arch.head_dim if arch.qk_norm else 0",
        tests=("tests/unit/theory/test_counting.py::test_published_parameter_counts",),
    ),
    Mutant(
        name="flops-of-attention",
        what="the FLOPs of causal attention ignore that a window's first tokens have fewer keys",
        file="theory/flops.py",
        before="return seen * (1 - seen / (2 * seq_len)) if causal else float(seen)",
        after="return (seen / 2 if seen == seq_len else seen) if causal else float(seen)",
        tests=("tests/unit/theory/test_counting.py::test_a_window_hides_keys_that_are_counted",),
    ),
    Mutant(
        name="memory-of-zero-2",
        what="ZeRO-2 is planned with the whole gradients of ZeRO-1",
        file="theory/params.py",
        before="gradient = g / n if parallel.zero == 2 else g",
        after="gradient = g",
        tests=("tests/unit/theory/test_params.py",),
    ),
    Mutant(
        name="memory-of-outer-units",
        what="the peak of ZeRO-3 leaves out embedding and head, which stay gathered",
        file="theory/memory.py",
        before="alive = outside + unit * (1 + parallel.prefetch)",
        after="alive = unit * (1 + parallel.prefetch)",
        tests=("tests/unit/theory/test_memory.py::test_whole_parameters_are_there_once",),
    ),
    Mutant(
        name="traffic-of-zero-3",
        what="ZeRO-3 is planned with one gather per micro-batch: that of the backward is forgotten",
        file="theory/traffic.py",
        before="gathers = (2 if parallel.reshard else 1) * often",
        after="gathers = often",
        tests=("tests/unit/theory/test_traffic.py",),
    ),
    Mutant(
        name="daly-interval",
        what="Daly's interval between checkpoints is Young's: the higher orders are left out",
        file="theory/failures.py",
        before="return young_interval(mttf, stall) * (1 + math.sqrt(part) / 3 + part / 9) - stall",
        after="return young_interval(mttf, stall)",
        tests=("tests/unit/theory/test_failures.py",),
    ),
    Mutant(
        name="price-of-spares",
        what="a spare node is paid for as one device",
        file="planner/run/outlook.py",
        before='per_node = 1 if cluster.device == "cpu" else cluster.devices_per_node',
        after="per_node = 1",
        tests=("tests/unit/planner/run/test_outlook.py",),
    ),
    Mutant(
        name="price-of-lost-time",
        what="the money of a run is that of its productive days, without failures and checkpoints",
        file="planner/run/outlook.py",
        before="usd = _usd(run, cluster, given, job, days, stored, checkpoint_bytes)",
        after="usd = _usd(run, cluster, given, job, productive / DAY_SECONDS, stored, checkpoint_bytes)",
        tests=("tests/unit/planner/run/test_outlook.py",),
    ),
]
