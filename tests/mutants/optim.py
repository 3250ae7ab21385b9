"""Faults in the optimizer: bias correction, weight decay, clipping, loss scale, learning rate."""

from .mutant import Mutant

_ADAMW = "tests/unit/trainer/optim/test_adamw.py"
_CLIP = "tests/unit/trainer/optim/test_clip.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="bias-correction",
        what="the first step has the bias correction of the second",
        file="trainer/optim/optimizer.py",
        before="STEP: torch.zeros((), dtype=torch.float32, device=device)",
        after="STEP: torch.ones((), dtype=torch.float32, device=device)",
        tests=(f"{_ADAMW}::test_one_step_is_the_published_update",),
    ),
    Mutant(
        name="decay-of-norms",
        what="weight decay pulls norm weights to zero",
        file="plugins/piece.py",
        before="return len(self.shape) >= 2",
        after="return len(self.shape) >= 1",
        tests=(f"{_ADAMW}::test_matrices_decay_and_norms_do_not",),
    ),
    Mutant(
        name="clipping-raises",
        what="gradients below the limit are scaled up to it",
        file="trainer/optim/gradients.py",
        before="factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        after="factor = max_norm / (norm + 1e-6)",
        tests=(_CLIP,),
    ),
    Mutant(
        name="norms-in-bf16",
        what="the norms of bf16 gradients are rounded to bf16 before their squares are summed",
        file="trainer/torch_private.py",
        before="torch._foreach_norm(tensors, 2, dtype=dtype)",
        after="torch._foreach_norm(tensors, 2)",
        tests=("tests/unit/trainer/test_torch_private.py",),
    ),
    Mutant(
        name="loss-scale-streak",
        what="finite steps count towards the growth of the loss scale across an overflow",
        file="trainer/optim/gradients.py",
        before="good = torch.where(overflow, 0, self.good_steps + 1)",
        after="good = torch.where(overflow, self.good_steps, self.good_steps + 1)",
        tests=("tests/unit/trainer/optim/test_loss_scale.py",),
    ),
    Mutant(
        name="schedule-after-warm-up",
        what="the cosine begins at step 0: the learning rate drops at the end of warm-up",
        file="plugins/schedule.py",
        before="done = (step - schedule.warmup_steps) / (steps - schedule.warmup_steps)",
        after="done = step / steps",
        tests=("tests/unit/trainer/optim/test_schedule.py",),
    ),
]
