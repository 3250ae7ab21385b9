"""Faults in parallelism: ZeRO, tensor and pipeline parallelism, rings, Ulysses, experts, canonical sums."""

from .mutant import Mutant

_PROOF = "tests/proof/test_core.py::test_equals_one_process"
_CONTEXT = "tests/dist/test_context.py::test_every_form_equals_one_process"

MUTANTS: list[Mutant] = [
    Mutant(
        name="zero-mean-of-copies",
        what="gradients are averaged over the ranks of one copy of the model, not over all that read tokens",
        file="trainer/parallel/zero.py",
        before="own.mul_(1 / self.mesh.parallel.token_ranks)",
        after="own.mul_(1 / self.mesh.parallel.shard_ranks)",
        tests=(f"{_PROOF}[4-hsdp-1]",),
    ),
    Mutant(
        name="zero-2-last-micro-batch",
        what="ZeRO-2 keeps the reduced gradients of the last micro-batch only",
        file="trainer/parallel/zero.py",
        before="bucket.own = scatter.own if bucket.own is None else bucket.own.add_(scatter.own)",
        after="bucket.own = scatter.own",
        tests=(f"{_PROOF}[2-zero-2]",),
    ),
    Mutant(
        name="norm-counts-copies",
        what="a weight that every tensor-parallel rank holds whole counts once per rank in the gradient norm",
        file="trainer/parallel/units.py",
        before='return not (whole_on_tp and mesh.index("tp") > 0) and not',
        after="return not",
        tests=(f"{_PROOF}[2-tp+sp]",),
    ),
    Mutant(
        name="tensor-heads-of-others",
        what="with fewer key/value heads than tensor-parallel ranks, a rank keeps the head of other queries",
        file="trainer/parallel/tensor.py",
        before="output.chunk(heads, dim=-1)[index * heads // ranks]",
        after="output.chunk(heads, dim=-1)[index % heads]",
        tests=(f"{_PROOF}[4-tp+sp over 4, tied]",),
    ),
    Mutant(
        name="pipeline-warm-up",
        what="every rank of 1F1B runs one forward more before its first backward, and holds one micro-batch more",
        file="theory/schedule/build.py",
        before='case "1f1b":\n            return _looped(name, pp, 1, micro_batches, lambda rank: pp - 1 - rank)',
        after='case "1f1b":\n            return _looped(name, pp, 1, micro_batches, lambda rank: pp - rank)',
        tests=(
            "tests/unit/theory/test_schedule.py::test_1f1b_as_megatron_draws_it",
            "tests/unit/theory/test_schedule.py::test_activations_in_flight_are_those_of_the_papers",
        ),
    ),
    Mutant(
        name="pipeline-keys-of-sequences",
        what="all micro-batches of a step have the same keys for the routers' noise",
        file="trainer/parallel/pipeline.py",
        before="* own + micro_batch * rows",
        after="* own",
        tests=("tests/dist/test_pipeline.py::test_routers_get_the_keys_of_their_sequences_and_the_weight_of_a_nat",),
    ),
    Mutant(
        name="ring-way-home",
        what="in a ring that a window ends early, gradients of keys arrive one rank further, not at their own",
        file="trainer/parallel/ring.py",
        before="ring.pass_on(added, 1 if step < last else -last)",
        after="ring.pass_on(added, 1)",
        tests=(f"{_CONTEXT}[4-kv_heads2]",),
    ),
    Mutant(
        name="ring-merge",
        what="a merge of partial results keeps the larger normalizer, not the sum of both",
        file="trainer/parallel/ring.py",
        before="lse.copy_(merged)",
        after="lse.copy_(torch.maximum(lse, out_lse))",
        tests=(f"{_CONTEXT}[2-kv_heads0]",),
    ),
    Mutant(
        name="ulysses-repeated-heads",
        what="with fewer key/value heads than ranks, Ulysses repeats heads in turn instead of one after the other",
        file="trainer/parallel/context.py",
        before="k_BGtH.repeat_interleave(copies, dim=1), v_BGtH.repeat_interleave(copies, dim=1)",
        after="k_BGtH.repeat(1, copies, 1, 1), v_BGtH.repeat(1, copies, 1, 1)",
        tests=(f"{_CONTEXT}[4-kv_heads2]",),
    ),
    Mutant(
        name="experts-way-back",
        what="results of experts return in the order in which rows were sorted for the experts, not its inverse",
        file="trainer/parallel/expert.py",
        before="return Route(self.group, sent, received, of_own, order_A, order_A.argsort())",
        after="return Route(self.group, sent, received, of_own, order_A, order_A)",
        tests=("tests/unit/trainer/parallel/test_expert.py::test_rows_arrive_by_expert_and_return_in_their_order",),
    ),
    Mutant(
        name="loads-of-own-tokens",
        what="a rank divides the loads of whole sequences by the number of its own tokens",
        file="trainer/model/routing.py",
        before="loads_BE = loads_BE * (moe.num_experts / whole_BTK[0].numel())",
        after="loads_BE = loads_BE * (moe.num_experts / (probabilities_BTE.shape[1] * moe.top_k))",
        tests=(f"{_PROOF}[2-experts x ring]",),
    ),
    Mutant(
        name="canonical-tree",
        what="canonical sums add the parts of a rank one after the other: the bits depend on the number of copies",
        file="trainer/parallel/canonical.py",
        before="while sums and sums[-1][0] == level:",
        after="while sums:",
        tests=("tests/dist/test_canonical.py",),
    ),
    Mutant(
        name="balance-direction",
        what="biases of experts with too many assignments rise",
        file="trainer/parallel/balance.py",
        before="return bias_RE + rate * below_RE.sign().to(bias_RE.dtype)",
        after="return bias_RE - rate * below_RE.sign().to(bias_RE.dtype)",
        tests=("tests/unit/trainer/parallel/test_balance.py::test_a_bias_follows_the_sign_of_what_its_expert_lacks",),
    ),
]
