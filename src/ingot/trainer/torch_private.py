"""Every private name of PyTorch that ingot uses, each in a wrapper. A test checks that no other file of src uses one.

A name is private if it, or a module on its path, begins with an underscore. A wrapper states why ingot needs the name
("Why"), the versions of PyTorch it was checked on ("Checked"), and what to use once the name is gone ("Fallback").
"""

import contextlib
import json
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_leaves"]  # documented by the classes below

# -- collectives and kernels ------------------------------------------------------------------------------------------


def functional_collectives() -> Any:
    """Return the namespace of collectives that return new tensors: all_reduce, all_gather_into_tensor, wait_tensor, ...

    Why: the compiler can see and overlap these operators, but not those of torch.distributed.
    Checked: 2.11, 2.13.
    Fallback: torch.distributed's own functions, once the compiler traces them.
    """
    return torch.ops._c10d_functional


class AttentionKernels(NamedTuple):
    """The operators of attention, by kernel."""

    flash_on_cpu: Any
    flash_on_cpu_backward: Any
    flash: Any
    flash_backward: Any
    efficient: Any
    efficient_backward: Any
    cudnn: Any
    packed: Any
    packed_backward: Any


def attention_kernels() -> AttentionKernels:
    """Return the operators that scaled_dot_product_attention chooses from.

    Why: they return the log-sum-exp of the scores, by which a ring merges partial results; and selective recompute and
    the trace recognize attention by them. torch.nn.attention.varlen calls `packed`, but not for grouped heads in 2.11.
    Checked: 2.11, 2.13; `packed` in 2.13, without a GPU.
    Fallback: torch.nn.attention.flex_attention with return_lse, where it is as fast on CPU and CUDA.
    """
    aten = torch.ops.aten
    return AttentionKernels(
        flash_on_cpu=aten._scaled_dot_product_flash_attention_for_cpu,
        flash_on_cpu_backward=aten._scaled_dot_product_flash_attention_for_cpu_backward,
        flash=aten._scaled_dot_product_flash_attention,
        flash_backward=aten._scaled_dot_product_flash_attention_backward,
        efficient=aten._scaled_dot_product_efficient_attention,
        efficient_backward=aten._scaled_dot_product_efficient_attention_backward,
        cudnn=aten._scaled_dot_product_cudnn_attention,
        packed=aten._flash_attention_forward,
        packed_backward=aten._flash_attention_backward,
    )


def grouped_product_kernel() -> Any:
    """Return the operator of torch.nn.functional.grouped_mm.

    Why: selective recompute and the trace see operators, not functions.
    Checked: 2.11, 2.13.
    Fallback: the operator that replaces it; a test of recompute counts the products that run.
    """
    return torch.ops.aten._grouped_mm


def operator_packet(operator: Any) -> Any:
    """Return the operator without its overload: aten.mm for aten.mm.default.

    Why: a trace counts and names operators, whichever overload runs.
    Checked: 2.11, 2.13.
    Fallback: the part of str(operator) before the overload's name.
    """
    return operator._overloadpacket


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for all tensors with this storage while the storage exists.

    Why: the storages of fake tensors have no data pointer.
    Checked: 2.11, 2.13.
    Fallback: data_ptr(), once fake storages have one.
    """
    return storage._cdata


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the newest collectives that this process began, oldest first, as torch's flight recorder keeps them.

    It keeps as many as TORCH_FR_BUFFER_SIZE of the environment says, none by default. Each has process_group [name,
    description], collective_seq_id, is_p2p, profiling_name ("gloo:all_reduce"), input_sizes, output_sizes,
    input_dtypes, time_created_ns and retired (whether it is complete).
    Gloo and NCCL have a recorder each; some builds show the same entries in both.
    Why: it knows the collective in which a rank of a hung job waits, with Gloo and NCCL alike.
    Checked: 2.11 (by name), 2.13.
    Fallback: none; a hang is then reported with stacks alone.
    """
    module = getattr(torch._C, "_distributed_c10d", None)  # absent in builds without torch.distributed
    dumps = (getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    found = {json.dumps(entry): entry for dump in dumps if dump for entry in json.loads(dump()).get("entries", [])}
    return sorted(found.values(), key=lambda entry: entry["time_created_ns"])


def ranks_of_groups() -> dict[str, list[int]]:
    """Return name -> global ranks of every process group of this process.

    Why: the flight recorder names groups, not their ranks.
    Checked: 2.11, 2.13.
    Fallback: a list of our own, filled where groups are made (trainer/mesh/mesh.py).
    """
    groups = distributed_c10d._world.pg_group_ranks.items()  # with an int for groups of other ranks
    return {group.group_name: sorted(ranks) for group, ranks in groups if isinstance(group, dist.ProcessGroup)}


def abort_communicators() -> int:
    """Abort the NCCL communicators of this process, so that no stream of its device waits for a lost peer. Returns how
    many groups had one.

    A thread may call it while the main thread waits for the device. The groups stay, and their next collective raises
    an error. Groups of Gloo are left alone: a lost peer ends their collectives, and their own abort ends none.
    Why: NCCL has no other end of a collective whose peer is lost on the same machine. All aborts are in one group of
    NCCL, or one may wait for another.
    Checked: 2.13, with a backend of a test only: no GPU was there.
    Fallback: none; such a rank is killed and replaced.
    """
    backends = []
    names = distributed_c10d._world.pg_names.items()
    for group, _ in sorted(names, key=lambda entry: entry[1], reverse=True):  # the newest first, as torch does
        with contextlib.suppress(RuntimeError):  # the group has no backend for GPUs
            backend = group._get_backend(torch.device("cuda"))
            if hasattr(backend, "_group_start"):  # Gloo may be the backend for all devices
                backends.append(backend)
    if backends:
        backends[0]._group_start()
        try:
            for backend in backends:
                backend.abort()
        finally:  # or all later calls of this thread would be in the group
            backends[0]._group_end()
    return len(backends)


# -- modules ----------------------------------------------------------------------------------------------------------


class WideBuffers(nn.Module):
    """A module whose buffers stay at least float32 when `to`, `half`, `to_empty`, ... change its dtype.

    Why: nn.Module has no other hook for these methods that reaches submodules.
    Checked: 2.11, 2.13.
    Fallback: plain attributes for the buffers, moved by the code that moves the model.
    """

    def _apply(self, fn, recurse: bool = True):
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, value in self.named_buffers():
            if (wide := torch.promote_types(value.dtype, torch.float32)) != value.dtype:
                setattr(self, name, before[name].to(value.device, wide))
        return self


def gather_before_backward(fsdp_module: Any, output: Any) -> Any:
    """Hook `output` so that `fsdp_module` gathers its parameters when the backward of `output` begins; return `output`.

    Why: FSDP2 hooks the module's own output only; one inside a recomputed block is needed before the block runs again.
    Checked: 2.11, 2.13.
    Fallback: fsdp_module.unshard() in a hook of the gradient of `output`.
    """
    return fsdp_module._get_fsdp_state()._register_pre_backward_hook(output)


def drop_partial_sums(fsdp_module: Any) -> None:
    """Drop the sums of a step's gradients that `fsdp_module` keeps for an exchange with the copies of the model.

    Why: gradients that are only read are reduced neither within a copy nor over copies.
    Checked: 2.13.
    Fallback: exchange them, with set_requires_all_reduce(True), and drop the result.
    """
    for group in fsdp_module._get_fsdp_state()._fsdp_param_groups:
        group._partial_reduce_output = None


def waits_of_fsdp() -> tuple[type, tuple[str, ...]]:
    """Return the class of the units of FSDP2, and its methods in which the stream that computes waits for exchanges.

    Why: these waits are for events of FSDP2's own streams, which show no group.
    Checked: 2.13, without a GPU.
    Fallback: none; the waits of ZeRO-3 on GPUs are then in no axis.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup, ("wait_for_unshard", "post_backward", "finalize_backward")


def group_of_fsdp_wait(unit: Any, event: Any) -> dist.ProcessGroup:
    """Return the group whose exchange recorded `event`, for which a stream waits in a method of `unit` (waits_of_fsdp).

    Why: see waits_of_fsdp.
    Checked: 2.13, without a GPU. Before it, the last sum over copies (HSDP) counts in the group of the shards.
    Fallback: the group of the shards.
    """
    if hasattr(unit.mesh_info, "replicate_process_group"):
        streams, kept = unit.comm_ctx, unit._all_reduce_state
        last = getattr(streams, "_last_post_reduce_events", {}).get(getattr(streams, "all_reduce_stream", None))
        if event is last or (kept is not None and event is kept.event):
            return unit._all_reduce_process_group
    return unit._all_gather_process_group


# -- the compiler -----------------------------------------------------------------------------------------------------


def compiler_is_loaded() -> bool:
    """Return whether this process has imported the compiler.

    Why: a call of torch.compiler imports the compiler, which takes half a second in a process that compiles nothing.
    Checked: 2.11, 2.13.
    Fallback: always call torch.compiler.set_stance.
    """
    return "torch._dynamo" in sys.modules


def allocate(module: nn.Module, device: torch.device | str) -> None:
    """Give the parameters and buffers of a module on the meta device memory, as to_empty does; values are not set.

    Why: to_empty imports a part of the compiler, which takes 0.6 s in each rank.
    Checked: 2.13.
    Fallback: module.to_empty(device=device).
    """
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def overlap_products_with_collectives(group_name: str) -> None:
    """Let the compiler split a gather or reduce-scatter and its matrix product into parts that overlap.

    Why: there is no public switch for async tensor parallelism (Wang et al. 2023).
    Checked: 2.11, 2.13 (that the names exist; the overlap needs several GPUs of one NVLink domain).
    Fallback: a public option of torch.compile.
    """
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(group_name)  # type: ignore[arg-type]


# -- traces without devices -------------------------------------------------------------------------------------------


class TraceMode(TorchDispatchMode):
    """A mode that sees every operation below autograd.

    Why: there is no public class of dispatch modes. The override saves time: nothing is compiled here.
    Checked: 2.11, 2.13.
    Fallback: the public class; without the override a trace is slower.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class UncompiledFakeMode(FakeTensorMode):
    """A mode in which tensors have shapes and dtypes, but no memory.

    Why: there is no public fake tensor. The override saves time, as in TraceMode; and PyTorch's cache of results takes
    longer than deriving a result, because FakeProgram has a cache of its own.
    Checked: 2.11, 2.13.
    Fallback: the public class; without the override and with the cache a trace is slower.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.cache_enabled = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def changes_its_inputs(operation: Any) -> bool:
    """Return whether an operator of a dispatch mode writes to one of its arguments, as aten.add_ does.

    Why: afterwards, the values that it read are gone.
    Checked: 2.13.
    Fallback: a name that ends with "_", or an argument `out`.
    """
    return getattr(getattr(operation, "_schema", None), "is_mutable", False)


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the Euclidean norm of each tensor, scalars of `dtype`, in which the squares are summed.

    Why: on a GPU one launch serves many tensors; elsewhere the norms are those of torch.linalg.vector_norm.
    Checked: 2.13.
    Fallback: torch.linalg.vector_norm of one tensor after the other.
    """
    return tuple(torch._foreach_norm(tensors, 2, dtype=dtype))  # pyright: ignore[reportPrivateImportUsage]


def running_node() -> tuple[str, int] | None:
    """Return (name, sequence number) of the node of autograd whose backward this thread runs; None outside a backward.

    Why: a dispatch mode sees the operations of a backward, not which operation of the forward they belong to.
    Checked: 2.13.
    Fallback: None; operations of a backward are then named without their module.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def next_sequence_number() -> int:
    """Return the sequence number that the next node of autograd made by this thread will have.

    Why: the nodes of a module are those that were made between the begin and the end of its forward.
    Checked: 2.13.
    Fallback: as for `running_node`.
    """
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def new_fake_tensor(meta: Tensor, attributes: dict[str, Any]) -> FakeTensor:
    """Return FakeTensor(mode, meta, cpu) without its checks. attributes: copied from a tensor made by the constructor.

    Why: a trace makes millions of fake tensors, and the checks take most of their time.
    Checked: 2.11, 2.13.
    Fallback: the constructor.
    """
    cpu = torch.device("cpu")
    made = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=cpu)
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes)
    return made


def without_dispatch() -> Any:
    """Return a context in which tensor subclasses and modes do not see operations.

    Why: a cached result of a trace need not pass through the dispatcher.
    Checked: 2.11, 2.13.
    Fallback: no context; a trace is slower.
    """
    return torch._C._DisableTorchDispatch()


def fake_store() -> Any:
    """Return the store of a process group of the backend "fake", whose collectives return at once.

    Why: a single process traces one rank of a run with thousands of ranks.
    Checked: 2.11, 2.13.
    Fallback: the store that the documentation of the backend names.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def count_group_name(ranks: list[int]) -> None:
    """Use up the name of a process group that does not include this rank.

    Why: torch.distributed numbers the names of groups on every rank; a trace skips the groups of other ranks.
    Checked: 2.11, 2.13.
    Fallback: new_group for every group; a trace of thousands of ranks is slower.
    """
    distributed_c10d._process_group_name(ranks, use_hashed_name=False)


def group_of_name(name: str) -> Any:
    """Return the process group with this name, which an operator got as an argument.

    Why: functional collectives refer to groups by name.
    Checked: 2.11, 2.13.
    Fallback: a table of the groups that the trace saw created.
    """
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def is_process_group(value: Any) -> bool:
    """Return whether `value`, an argument of an operator, is a process group wrapped in a torch.ScriptObject.

    Why: torch.ScriptObject has no public type.
    Checked: 2.11, 2.13.
    Fallback: try dist.ProcessGroup.unbox and catch its error.
    """
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
