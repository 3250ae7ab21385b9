"""The planner's counts of plug-ins' layers against the real modules: parameters, FLOPs, kept bytes, and a dry run."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from ingot.cli.main import main  # noqa: E402
from ingot.plugins.registry import MAIN, Registry  # noqa: E402
from ingot.schema.run import Data, RunConfig, Train  # noqa: E402
from ingot.theory.params import count_parameters, parameters_by_part  # noqa: E402
from ingot.theory.work import _block_flops, block_attention_flops  # noqa: E402
from ingot.trainer.model.transformer import Transformer  # noqa: E402

from .test_memory import EXPERTS, TINY, kept, one, saved_bytes  # noqa: E402

ROOT = Path(__file__).parents[3]
LOSS_PAGE = ROOT / "docs" / "extend" / "loss.md"
ALL = {"feed_forward": "squared_relu", "norm": "layer", "attention": "gated", "block": "parallel"}
MODELS = {
    "gelu": {"feed_forward": "gelu"},
    "squared relu": {"feed_forward": "squared_relu"},
    "layer norm": {"norm": "layer"},
    "gated attention": {"attention": "gated"},
    "parallel block": {"block": "parallel"},
    "parallel block of experts": {"block": "parallel", "moe": EXPERTS, "num_layers": 3},
    "all": ALL,
    "power": {"feed_forward": "power_relu"},
    "dynamic tanh": {"norm": "dynamic_tanh"},
    "clipped attention": {"attention": "clipped"},
    "sandwich block": {"block": "sandwich"},
}


@pytest.fixture(autouse=True)
def examples():
    """The files of examples/extend, and the examples with settings of their pages."""
    for name in ("squared_relu", "layer_norm", "gated_attention", "parallel_block"):
        runpy.run_path(str(ROOT / "examples" / "extend" / f"{name}.py"))
    for page in ("feed_forward", "norm", "attention", "block"):
        text = (ROOT / "docs" / "extend" / f"{page}.md").read_text()
        (code,) = [c for c in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "Options" in c]
        exec(code, {"__name__": "page"})
    yield
    for registry in Registry.every:
        registry.forget(MAIN)


def parts_of(model) -> dict[str, int]:
    """The parameters of a model, by the names that `parameters_by_part` uses."""
    found = {"embedding": 0, "attention": 0, "mlp": 0, "norms": 0, "head": 0}
    for name, parameter in model.named_parameters():
        *_, module, _ = name.split(".")
        part = "norms" if "norm" in module else next((p for p in ("attention", "mlp", "moe") if f".{p}." in name), "")
        part = {"moe": "experts", "": "embedding"}.get(part, part)
        found[part] = found.get(part, 0) + parameter.numel()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_real_model(name):
    arch = replace(TINY, **MODELS[name])
    model = Transformer(arch)
    assert parameters_by_part(arch) == parts_of(model)
    assert count_parameters(arch) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_kept_bytes_are_what_autograd_saves(name, precision):
    arch = replace(TINY, **MODELS[name])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    assert kept(one(arch, precision)) == pytest.approx(saved_bytes(arch, dtype, 8, 128), rel=0.02)


@pytest.mark.parametrize("name", [name for name in MODELS if "experts" not in name])
def test_flops_are_those_of_the_real_block(name):
    arch = replace(TINY, **MODELS[name])
    model, tokens = Transformer(arch), torch.zeros(8, 128, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for op, flops in counted.items() if "attention" not in op)
    head = 2 * tokens.numel() * arch.d_model * arch.vocab_size
    assert products == arch.num_layers * _block_flops(one(arch), experts=False) + head
    assert block_attention_flops(one(arch)) == block_attention_flops(one(TINY))


RUN = """name = "x"
[model]
vocab_size = 512
d_model = 64
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 16
d_ffn = 176
[data]
tokens = "tokens"
[train]
steps = 10
seq_len = 64
global_batch = 4
micro_batch = 1
[parallel]
dp_shard = 2
tp = 2
zero = 1
[plugins]
modules = ["squared_relu", "layer_norm", "gated_attention", "parallel_block"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_dry_run_agrees_with_every_figure(process, tmp_path, capsys, recompute):
    for registry in Registry.every:
        registry.forget(MAIN)
    own = "".join(f'{key} = "{name}"\n' for key, name in ALL.items())
    text = RUN.replace("[data]", own + "[data]").replace("[plugins]", f'recompute = "{recompute}"\n[plugins]')
    (tmp_path / "run.toml").write_text(text + f'folder = "{ROOT / "examples" / "extend"}"\n')
    main(["check", str(tmp_path / "run.toml"), "--simulate", "--json"])
    found = json.loads(capsys.readouterr().out)["simulated"]
    assert not found["missing"] and found["alike"] and found["fault"] is None
    figures = {figure["what"]: figure["deviation"] for figure in found["compared"]}
    assert len(figures) > 3 and max(figures.values()) <= 0.01, figures
    assert found["over_bill"] == []
    traced = max(moment["bytes"] for moment in found["ranks"][0]["moments"].values())
    assert found["planner_bytes"][0] == pytest.approx(traced, rel=0.05)


@pytest.mark.slow
def test_a_layer_that_declares_too_little_is_named(process, tmp_path, capsys):
    example = (ROOT / "examples" / "extend" / "squared_relu.py").read_text()
    (tmp_path / "frugal.py").write_text(example.replace("saved=2", "saved=0").replace("squared_relu", "frugal"))
    text = RUN.replace("[data]", 'feed_forward = "frugal"\n[data]').partition("[plugins]")[0]
    (tmp_path / "run.toml").write_text(text + '[plugins]\nmodules = ["frugal"]\n')
    main(["check", str(tmp_path / "run.toml"), "--simulate"])
    shown = capsys.readouterr().out
    assert "More memory than planned" in shown and "model.feed_forward 'frugal' of frugal" in shown


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_dry_run_agrees_with_the_memory_of_a_loss_term(process, tmp_path, capsys, softcap):
    text = RUN.partition("[parallel]")[0].replace("vocab_size = 512", f"vocab_size = 2048\nlogit_softcap = {softcap}")
    text = text.replace("seq_len = 64", "seq_len = 1024").replace(
        "micro_batch = 1", 'micro_batch = 1\nprecision = "fp32"'
    )
    text += '[loss.z]\nweight = 0.1\n[plugins]\nmodules = ["z_loss"]\n'
    (tmp_path / "run.toml").write_text(text + f'folder = "{ROOT / "examples" / "extend"}"\n')
    main(["check", str(tmp_path / "run.toml"), "--simulate", "--json"])
    found = json.loads(capsys.readouterr().out)["simulated"]
    phase = found["ranks"][0]["moments"]["steady step"]
    assert phase["place"] == "forward readout"
    assert found["planner_bytes"][0] == pytest.approx(phase["bytes"], rel=0.01)


def test_a_loss_term_adds_its_tensors_to_a_chunk(process):
    from ingot.plugins.loss import LOSS_TERMS, LossTermPart
    from ingot.theory.layout import positions
    from ingot.theory.memory import chunk_tokens, logits

    for name, tensors in (("small", 1), ("large", 5)):
        LOSS_TERMS.register(LossTermPart(name=name, term="none:none", tensors=tensors))
    arch = replace(TINY, vocab_size=2048)
    train = Train(steps=1, seq_len=1024, global_batch=1, micro_batch=1, precision="fp32")
    run = RunConfig(name="x", model=arch, data=Data(tokens=""), train=train)

    def peak(*names):
        (position,) = positions(replace(run, loss={name: {"weight": 1.0} for name in names}))
        return logits(position).value

    tensor = chunk_tokens(2048, "cpu") * 2048 * 4
    assert peak("small") == peak() + tensor  # the loss itself needs logits and slope
    assert peak("small", "large") == peak("large") == peak() + 5 * tensor


def readout_work(arch, term: str, tokens: int) -> tuple[float, int]:
    """The bytes of tensors of the logits' shape that the loss reads and writes, and the operations that it starts."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from ingot.trainer.loss_terms import loss_terms
    from ingot.trainer.model.loss import Readout

    class Count(TorchDispatchMode):
        moved, operations = 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if not func.is_view:
                self.operations += 1
                if "empty" not in str(func):
                    used = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
                    self.moved += sum(t.nbytes for t in used if t.numel() == tokens * arch.vocab_size)
            return out

    readout = Readout(arch)
    readout.terms = loss_terms(with_terms(arch, tokens, term)) if term else []
    hidden, weight = torch.randn(tokens, arch.d_model), torch.randn(arch.vocab_size, arch.d_model)
    with Count() as count:
        readout(hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, arch.vocab_size, (tokens,)))
    return count.moved, count.operations


def with_terms(arch, tokens: int, *names: str) -> RunConfig:
    train = Train(steps=1, seq_len=tokens, global_batch=1, micro_batch=1, precision="fp32")
    loss = {name: {"weight": 0.1} for name in names}
    return RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, loss=loss)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("term", ["z", "poly"])
def test_the_work_of_a_loss_term_is_what_the_loss_really_does(term, softcap):
    """Work follows the declared tensors: that of the z-loss is exact, that of other terms is not far away."""
    from ingot.theory.layout import positions
    from ingot.theory.work import step_work

    if term == "z":
        runpy.run_path(str(ROOT / "examples" / "extend" / "z_loss.py"))
    else:
        (code,) = re.findall(r"^```python\n(from dataclasses.*?)^```", LOSS_PAGE.read_text(), re.DOTALL | re.MULTILINE)
        exec(code, {"__name__": "page"})
    arch = replace(TINY, vocab_size=4096, logit_softcap=softcap)
    tokens = 256  # one chunk of the loss
    plain, more = (step_work(positions(with_terms(arch, tokens, *names))[0]) for names in ((), (term,)))
    (moved, operations), (all_moved, all_operations) = (readout_work(arch, name, tokens) for name in ("", term))
    near = 0.02 if term == "z" else 0.2
    assert more.moved_bytes - plain.moved_bytes == pytest.approx(all_moved - moved, rel=near)
    assert more.operations - plain.operations == pytest.approx(all_operations - operations, rel=0.1)
    assert more.matmul_flops == plain.matmul_flops
