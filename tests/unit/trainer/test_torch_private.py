"""Private names of PyTorch: each works on the installed version, and only one file of src touches them.

Counted in every file of src that imports torch:
  - an import from torch with a part that begins with an underscore ("torch._dynamo", "from torch.x import _y");
  - an attribute that begins with one underscore and that no class, function or assignment of src defines;
  - a method of a subclass that overrides a private method of nn.Module or of a dispatch mode.
"""

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ingot
from ingot.trainer import torch_private as private

SOURCE = Path(ingot.__file__).parent
OVERRIDES = {"_apply", "_should_skip_dynamo"}


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def defined_names(trees) -> set[str]:
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names - OVERRIDES


def imports_of(node) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def private_names(tree: ast.Module, defined: set[str]) -> list[tuple[int, str]]:
    found = []
    imported = [name for node in ast.walk(tree) for name in imports_of(node)]
    if not any(name.split(".")[0] == "torch" for name in imported):
        return []
    for node in ast.walk(tree):
        for name in imports_of(node):
            if name.split(".")[0] == "torch" and is_private(name):
                found.append((node.lineno, name))
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in defined:
            found.append((node.lineno, node.attr))
        if isinstance(node, ast.FunctionDef) and node.name in OVERRIDES:
            found.append((node.lineno, node.name))
    return found


def test_one_file_touches_private_names():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    own = Path(private.__file__)
    defined = defined_names(tree for path, tree in trees.items() if path != own)
    found = {path: names for path, tree in trees.items() if (names := private_names(tree, defined))}
    assert found.pop(own)
    assert not found, {str(path.relative_to(SOURCE)): names for path, names in found.items()}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.distributed.distributed_c10d import _x",
        "import torch\nx = torch.ops._c10d_functional",
        "from torch import nn\nclass A(nn.Module):\n    def _apply(self, fn): ...",
        "import torch\ndef f(x): return x.untyped_storage()._cdata",
    ],
)
def test_a_private_name_is_found(line):
    assert private_names(ast.parse(line), set())


def wrappers():
    return [
        value
        for name, value in vars(private).items()
        if inspect.getmodule(value) is private and not name.startswith("_") and value is not private.AttentionKernels
    ]


@pytest.mark.parametrize("wrapper", wrappers(), ids=lambda wrapper: wrapper.__name__)
def test_every_wrapper_has_a_reason_its_versions_and_a_replacement(wrapper):
    lines = [line.strip().split(":")[0] for line in inspect.getdoc(wrapper).splitlines()]
    assert {"Why", "Checked", "Fallback"} <= set(lines)
    assert wrapper.__name__ in CHECKS


def checks_collectives():
    assert private.functional_collectives().wait_tensor(torch.ones(2)).sum() == 2


def checks_attention():
    q = torch.randn(1, 2, 4, 8)
    kernels = private.attention_kernels()
    out, lse = kernels.flash_on_cpu(q, q, q, 0.0, True)
    assert out.shape == q.shape and lse.shape == (1, 2, 4)
    back = kernels.flash_on_cpu_backward(out, q, q, q, out, lse, 0.0, True)
    assert [gradient.shape for gradient in back] == [q.shape] * 3
    assert all(hasattr(kernel, "default") for kernel in kernels)


def checks_grouped():
    assert private.grouped_product_kernel().default


def checks_packet():
    assert private.operator_packet(torch.ops.aten.mm.default) is torch.ops.aten.mm


def checks_key():
    x, y = torch.ones(4), torch.ones(4)
    assert private.storage_key(x.untyped_storage()) == private.storage_key(x[1:].untyped_storage())
    assert private.storage_key(x.untyped_storage()) != private.storage_key(y.untyped_storage())


def checks_buffers():
    class Narrow(private.WideBuffers):
        def __init__(self):
            super().__init__()
            self.register_buffer("wide", torch.full((2,), 1 / 3))
            self.weight = nn.Parameter(torch.ones(2))

    module = nn.Sequential(Narrow()).to(torch.bfloat16)[0]
    assert module.weight.dtype == torch.bfloat16 and torch.equal(module.wide, torch.full((2,), 1 / 3))


def checks_gather():
    from torch.distributed.fsdp import FSDPModule, fully_shard

    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=2)
    try:
        module = fully_shard(nn.Linear(2, 2))
        assert isinstance(module, FSDPModule)
        output = torch.ones(2, requires_grad=True) * 2
        assert private.gather_before_backward(module, output).shape == output.shape
    finally:
        dist.destroy_process_group()


def checks_compiler():
    assert private.compiler_is_loaded() in (True, False)


def checks_allocate():
    with torch.device("meta"):
        module = torch.nn.BatchNorm1d(3)
    private.allocate(module, "cpu")
    found = {name: (value.shape, value.dtype, value.device.type) for name, value in module.state_dict().items()}
    assert found == {n: (v.shape, v.dtype, "cpu") for n, v in torch.nn.BatchNorm1d(3).state_dict().items()}
    assert all(parameter.requires_grad for parameter in module.parameters())


def checks_overlap():
    import torch._inductor.config as inductor
    from torch.distributed import _symmetric_memory as symmetric

    assert inductor._micro_pipeline_tp is False and callable(symmetric.enable_symm_mem_for_group)


def checks_trace():
    class Count(private.TraceMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Count() as count:
        torch.ones(2) + 1
    assert count.seen >= 2


def checks_fake():
    with private.UncompiledFakeMode() as mode:
        fake = torch.empty(2, 3)
    attributes = dict(private.FakeTensor(mode, torch.empty(0, device="meta"), torch.device("cpu")).__dict__)
    made = private.new_fake_tensor(torch.empty(2, 3, device="meta"), attributes)
    assert type(made) is type(fake) is private.FakeTensor and made.shape == (2, 3) and made.device == fake.device


def checks_dispatch():
    with private.UncompiledFakeMode(), private.without_dispatch():
        assert type(torch.empty(2)) is torch.Tensor


def checks_groups():
    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=4)
    try:
        private.count_group_name([2, 3])
        group = dist.new_group([0, 1])
        assert private.group_of_name(group.group_name) is group
        assert not private.is_process_group(object())
    finally:
        dist.destroy_process_group()


CHECKS = {
    "functional_collectives": checks_collectives,
    "attention_kernels": checks_attention,
    "grouped_product_kernel": checks_grouped,
    "operator_packet": checks_packet,
    "storage_key": checks_key,
    "WideBuffers": checks_buffers,
    "gather_before_backward": checks_gather,
    "compiler_is_loaded": checks_compiler,
    "allocate": checks_allocate,
    "overlap_products_with_collectives": checks_overlap,
    "TraceMode": checks_trace,
    "UncompiledFakeMode": checks_fake,
    "new_fake_tensor": checks_fake,
    "without_dispatch": checks_dispatch,
    "fake_store": checks_groups,
    "count_group_name": checks_groups,
    "group_of_name": checks_groups,
    "is_process_group": checks_groups,
}


@pytest.mark.parametrize("name", CHECKS)
def test_it_works_on_the_installed_torch(name):
    CHECKS[name]()
