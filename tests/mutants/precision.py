"""Faults that float64 hides: sums and tables in bfloat16, and state that only low precision or a skipped step has."""

from .mutant import Mutant

_DTYPES = "tests/dist/test_dtypes.py::test_dtypes_of_a_step_in_bf16"
_KEPT = ("tests/dist/test_kept_state.py::test_a_skipped_step_and_a_checkpoint_keep_everything",)

MUTANTS: list[Mutant] = [
    Mutant(
        name="vocabulary-loss-in-bf16",
        what="the loss of a divided vocabulary is computed in the dtype of the logits",
        file="trainer/parallel/tensor.py",
        before="wide = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))",
        after="wide = logits_MV.clone()",
        tests=(f"{_DTYPES}[tp]",),
    ),
    Mutant(
        name="partial-gradients-in-bf16",
        what="the gradients of norms are summed over tensor-parallel ranks in bfloat16",
        file="trainer/parallel/tensor.py",
        before="total = torch.cat([g.reshape(-1) for g in gradients])",
        after="total = torch.cat([g.reshape(-1) for g in gradients]).bfloat16()",
        tests=(f"{_DTYPES}[tp]",),
    ),
    Mutant(
        name="ring-gradients-in-bf16",
        what="the gradients of keys and values are summed around a ring in bfloat16",
        file="trainer/parallel/ring.py",
        before="added = torch.zeros(kv.shape, dtype=wide, device=q.device)",
        after="added = torch.zeros(kv.shape, dtype=kv.dtype, device=q.device)",
        tests=(f"{_DTYPES}[ring]",),
    ),
    Mutant(
        name="rotary-tables-in-bf16",
        what="FSDP2 casts the rotary tables with the other inputs of a block",
        file="trainer/parallel/fsdp.py",
        before="cast_forward_inputs=False",
        after="cast_forward_inputs=True",
        tests=(f"{_DTYPES}[zero 3]",),
    ),
    Mutant(
        name="router-in-bf16",
        what="the logits of a router are computed in bfloat16",
        file="trainer/model/routing.py",
        before="return F.linear(_wide(x_BTD), _wide(weight_ED))",
        after="return _wide(F.linear(x_BTD, weight_ED))",
        tests=(f"{_DTYPES}[ep]",),
    ),
    Mutant(
        name="rate-of-the-step-before",
        what="a step has the learning rate of the step before",
        file="trainer/loop.py",
        before="train_step(trainer, batch, loop.learning_rate(batch.step))",
        after="train_step(trainer, batch, loop.learning_rate(max(batch.step - 1, 1)))",
        tests=("tests/e2e/test_recovery.py::test_a_rank_imports_neither_the_compiler_nor_fsdp",),
    ),
    Mutant(
        name="loss-scale-not-saved",
        what="a checkpoint lacks the loss scale",
        file="trainer/build.py",
        before="extras=loss_scale.state() if loss_scale else {}",
        after="extras={}",
        tests=_KEPT,
    ),
    Mutant(
        name="biases-of-a-skipped-step",
        what="a skipped step moves the biases that balance experts",
        file="trainer/step.py",
        before="parts.balance.step(step, veto)",
        after="parts.balance.step(step, None)",
        tests=_KEPT,
    ),
    Mutant(
        name="data-rank-transposed",
        what="the parts of a batch are dealt to the copies of the model in turn",
        file="trainer/mesh/mesh.py",
        before='self.index("dp_replicate") * self.parallel.dp_shard + self.index("dp_shard")',
        after='self.index("dp_shard") * self.parallel.dp_replicate + self.index("dp_replicate")',
        tests=("tests/unit/trainer/mesh/test_mesh.py::test_ranks_read_the_batch_copy_by_copy",),
    ),
    Mutant(
        name="gradient-veto-left-out",
        what="an update with a gradient that is not finite is made, unless the loss is scaled",
        file="trainer/default_policy.py",
        before="return ~torch.isfinite(grad_norm)",
        after="return ~torch.isfinite(grad_norm) & self.scaled_loss",
        tests=("tests/unit/trainer/test_loop.py::test_a_batch_whose_gradient_is_not_finite_is_skipped",),
    ),
]
