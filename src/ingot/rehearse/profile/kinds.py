"""The kinds of work in a step, and which operation and which kernel belong to which. No torch.

products       matrix products
attention      attention, with all that it calls
elementwise    every other operation that computes or moves tensors
optimizer      all operations of the update
communication  waits for other ranks that nothing hides
host           nothing computes because Python and torch have not started it yet
idle           nothing computes because the host waits: for data, or for the device
"""

PRODUCTS, ATTENTION, ELEMENTWISE, OPTIMIZER = "products", "attention", "elementwise", "optimizer"
COMMUNICATION, HOST, IDLE = "communication", "host", "idle"
KINDS = (PRODUCTS, ATTENTION, ELEMENTWISE, OPTIMIZER, COMMUNICATION, HOST, IDLE)
COMPUTING = (PRODUCTS, ATTENTION, ELEMENTWISE, OPTIMIZER)

_PRODUCTS = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv", "aten::dot"),
    *("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_int_mm", "aten::_addmm_activation"),
    *("aten::mkldnn_linear", "mkl::_mkl_linear", "mkldnn::_linear_pointwise", "aten::_sparse_semi_structured_mm"),
}
# Parts of names of operations and kernels of attention.
_ATTENTION = ("scaled_dot_product", "flash_attention", "flash_fwd", "flash_bwd", "fmha", "efficient_attention")
_ATTENTION += (
    "flex_attention",
    "cudnn_attention",
    "varlen_attn",
    "flashattn",
    "attention_forward",
    "attention_backward",
)
# Operations that touch no element.
_METADATA = {
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "as_strided", "slice"),
        *("select", "expand", "expand_as", "unsqueeze", "squeeze", "detach", "detach_", "alias", "split", "chunk"),
        *(
            "split_with_sizes",
            "unflatten",
            "flatten",
            "unbind",
            "narrow",
            "numpy_T",
            "movedim",
            "view_as",
            "lift_fresh",
        ),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "result_type"),
        *("is_nonzero", "item", "_local_scalar_dense", "to", "contiguous", "matmul", "linear", "requires_grad_"),
        *("diagonal", "real", "_has_compatible_shallow_copy_type", "data", "is_pinned", "record_stream", "lift_fresh"),
    )
}
_KERNELS_OF_PRODUCTS = ("gemm", "cutlass", "nvjet", "xmma", "cublas", "gemv", "splitkreduce", "triton_tem")
# Kernels of the compiler for elementwise work. Their names have those of operations whose results they read.
_FUSED = ("triton_poi", "triton_red", "triton_per", "triton_for", "triton_mix")
# Names of operations that start an exchange or describe one: they compute nothing.
_EXCHANGES = ("c10d::", "_c10d_functional", "gloo:", "nccl:", "record_param_comms")


def kind_of_operation(name: str) -> str:
    """Return the kind of an operation by its name in a trace: PRODUCTS, ATTENTION, ELEMENTWISE or HOST."""
    if name in _PRODUCTS:
        return PRODUCTS
    if "::" not in name or name in _METADATA or name.startswith(("autograd::", "torch::autograd::", *_EXCHANGES)):
        return HOST
    return ATTENTION if any(part in name.lower() for part in _ATTENTION) else ELEMENTWISE


def kind_of_kernel(name: str) -> str | None:
    """Return the kind of a kernel of a GPU by its name: COMMUNICATION, ATTENTION, PRODUCTS; None: any other work."""
    lower = name.lower()
    if "nccl" in lower:
        return COMMUNICATION
    if lower.startswith(_FUSED):
        return None
    if any(part in lower for part in _ATTENTION):
        return ATTENTION
    return PRODUCTS if any(part in lower for part in _KERNELS_OF_PRODUCTS) else None
