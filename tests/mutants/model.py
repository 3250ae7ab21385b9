"""Faults in the model: rotary angles, norms, masks, heads, softcap, router and experts."""

from .mutant import Mutant

_REFERENCE = "tests/unit/trainer/model/test_transformer.py::test_logits_equal_the_reference_implementation"

MUTANTS: list[Mutant] = [
    Mutant(
        name="rotary-direction",
        what="one half of every pair is rotated with the sign of the sine lost",
        file="trainer/model/layers.py",
        before="torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)",
        after="torch.cat((first * cos - second * sin, second * cos - first * sin), dim=-1)",
        tests=(_REFERENCE,),
    ),
    Mutant(
        name="rotary-frequencies",
        what="the exponents of rotary frequencies count pairs instead of dims: i / H, not 2i / H",
        file="trainer/model/layers.py",
        before="torch.arange(0, head_dim, 2, device=positions_T.device).float() / head_dim",
        after="torch.arange(head_dim // 2, device=positions_T.device).float() / head_dim",
        tests=(_REFERENCE,),
    ),
    Mutant(
        name="norm-of-keys",
        what="keys pass the RMSNorm of queries",
        file="trainer/model/attention.py",
        before="q_BTNH, k_BTGH = self.q_norm(q_BTNH), self.k_norm(k_BTGH)",
        after="q_BTNH, k_BTGH = self.q_norm(q_BTNH), self.q_norm(k_BTGH)",
        tests=(_REFERENCE,),
    ),
    Mutant(
        name="norm-of-latents",
        what="latent attention leaves out the RMSNorm of the latents of keys and values",
        file="trainer/model/attention.py",
        before="self.kv_up(self.kv_latent_norm(latent_BTC))",
        after="self.kv_up(latent_BTC * self.kv_latent_norm.weight)",
        tests=("tests/unit/trainer/model/test_latent.py::test_equals_its_equations_forward_and_backward",),
    ),
    Mutant(
        name="window-of-one-more",
        what="a token attends to one token before its window",
        file="trainer/model/attention.py",
        before="allowed &= distance_TS < window",
        after="allowed &= distance_TS <= window",
        tests=("tests/unit/trainer/model/test_attention.py::test_equals_a_plain_softmax",),
    ),
    Mutant(
        name="chunk-of-a-window",
        what="attention in chunks leaves out the earliest key of a chunk's first query",
        file="trainer/model/attention.py",
        before="first = max(keys - tokens + start - mask_spec.window + 1, 0)",
        after="first = max(keys - tokens + start - mask_spec.window + 2, 0)",
        tests=("tests/unit/trainer/model/test_attention.py::test_equals_a_plain_softmax",),
    ),
    Mutant(
        name="documents-before",
        what="a token attends to earlier documents of its sequence",
        file="trainer/model/attention.py",
        before="of_queries[:, :, None] == of_keys[:, None, :]",
        after="of_queries[:, :, None] >= of_keys[:, None, :]",
        tests=("tests/unit/trainer/model/test_transformer.py::test_document_mask_hides_earlier_documents",),
    ),
    Mutant(
        name="softcap-slope",
        what="the gradient passes the softcap as 1 - tanh, not 1 - tanh^2",
        file="trainer/model/loss.py",
        before="capped_MV.div_(cap).square_().neg_().add_(1)",
        after="capped_MV.div_(cap).neg_().add_(1)",
        tests=("tests/unit/trainer/model/test_loss.py::test_softcapped_logits_have_the_gradients_of_the_plain_form",),
    ),
    Mutant(
        name="router-scale",
        what="the routed scaling factor is lost where the weights of a token's experts are normalized",
        file="trainer/model/routing.py",
        before="log_scores_BTE.gather(-1, choices_BTK).softmax(-1) * moe.scale",
        after="log_scores_BTE.gather(-1, choices_BTK).softmax(-1)",
        tests=("tests/unit/trainer/model/test_moe.py::test_equals_the_loop_in_value_and_all_gradients",),
    ),
    Mutant(
        name="router-bias",
        what="the biases of loss-free balancing are computed but not used in the choice of experts",
        file="trainer/model/routing.py",
        before="choose(scores_BTE.detach(), self.bias, moe)",
        after="choose(scores_BTE.detach(), None, moe)",
        tests=("tests/unit/trainer/model/test_moe.py::test_a_bias_alone_balances_a_skewed_router",),
    ),
    Mutant(
        name="capacity-of-one-more",
        what="every expert takes one assignment more than its capacity",
        file="trainer/model/routing.py",
        before="place < moe.capacity(tokens)",
        after="place <= moe.capacity(tokens)",
        tests=("tests/unit/trainer/model/test_moe.py::test_capacity_by_hand",),
    ),
]
