"""Fixtures of all tests: real data when it is at hand, ranks forked from this process, a model nobody here wrote.

Tests do not depend on the caller's environment: variables that change output, threads or imports are set here, before
anything is imported that reads them, and the processes that tests start inherit them.
"""

import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings
from tests.isolation import forget_compiled, restored, seed
from tests.row_times import PROPERTY, rows_line

# Machines are shared: how long one example takes says nothing.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
for _name in (
    "PYTHONPATH",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "COLUMNS",
    "LINES",
    "TERM",
    "LANG",
    "LANGUAGE",
    "INGOT_NATIVE",
    "PYTHONDONTWRITEBYTECODE",
):
    os.environ.pop(_name, None)
# Compiled modules are kept, whatever the caller wants: every worker and every process that a test starts would compile
# all of them again, the tests' own with pytest's asserts.
sys.dont_write_bytecode = False
# One thread per process: forked ranks share the cores, and results stay the same on every machine. A rank that a run
# starts has as many as there are cores; they sleep while they wait.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", LC_ALL="C.UTF-8", TZ="UTC")
time.tzset()
# A job that a script starts with & ignores Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A process group that a test left in a cycle waits, when it is collected, for threads that a fork does not have.
os.register_at_fork(after_in_child=gc.freeze)

# Files of tests in memory: saves wait for the disk (fsync), up to nine tenths of the time of the tests of checkpoints.
# A caller who names a folder, with TMPDIR for one, has them there; .ci/nightly plays all tests on a disk.
_MEMORY = Path("/dev/shm")
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= 2 << 30 and "TMPDIR" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_addoption(parser):
    parser.addoption("--except", dest="done", metavar="FILE", help="leave out the tests whose names are lines of FILE")


def pytest_ignore_collect(collection_path, config):
    """Leave files without a test of the kind that `-m` asks for: every worker would read and import all of them."""
    kind = {"slow and not nightly": "slow", "nightly": "nightly"}.get(config.option.markexpr)
    named = any(collection_path.name in argument for argument in config.args)
    if kind and collection_path.suffix == ".py" and not named:
        return f"mark.{kind}" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config, items):
    if config.option.done:
        done = set(Path(config.option.done).read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_make_parametrize_id(val):
    """Name bytes by their length: compressed ones contain the time, and all workers must collect the same names."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep the tests of a file on one worker, long files first (tests/schedule)."""
    from tests.schedule import ByFile

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Collect tests without collections of garbage, which would visit all modules of torch again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Take what exists now out of every later collection of garbage: modules and thousands of test items."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """`-n auto`: one worker more than cores, because one of them waits most of the time."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    seed()
    item.user_properties += [(PROPERTY, row) for marker in item.iter_markers("row") for row in marker.args]


def pytest_terminal_summary(terminalreporter):
    """Print which rows of the board were played, and for how long."""
    found = [one for kind in terminalreporter.stats.values() for one in kind if isinstance(one, pytest.TestReport)]
    if line := rows_line(found):
        terminalreporter.write_line(line)


@pytest.fixture(scope="module", autouse=True)
def unchanged_by_file():
    """Undo what the fixtures of a test file change in the process; the next file may be any other (tests/isolation)."""
    with restored():
        yield
    forget_compiled()


@pytest.fixture(autouse=True)
def unchanged_by_test():
    """Undo what a test changes in the process (tests/isolation)."""
    with restored():
        yield


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real crawl files and text with ground truth; set INGOT_TEST_DATA to their folder."""
    folder = os.environ.get("INGOT_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real data: set INGOT_TEST_DATA to its folder")
    return Path(folder)


def _rank_main(function, rank, world, listener, arguments, pipe, stacks):
    import torch
    import torch.distributed as dist
    from tests.proof.ranks import join

    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        join(listener, rank, world, timedelta(seconds=60))
        result = function(rank, world, *arguments)
        dist.barrier()
        pipe.send((True, result))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # no atexit handlers of the parent's pytest


def _stacks_of(processes, files) -> str:
    """The stacks of all threads of the ranks that still run."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR2)
    time.sleep(1)
    found = []
    for rank, file in enumerate(files):
        file.seek(0)
        found.append(f"rank {rank}:\n{file.read().decode(errors='replace')}")
    return "\n".join(found)


_NEEDED_BY_RANKS = (
    "numpy.ma",  # numpy imports it for the first median
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "ingot.trainer.optim.adamw",
    "ingot.trainer.parallel.fsdp",
    "tests.proof.ranks",
)


@pytest.fixture
def fork_ranks():
    """`fork_ranks(function, world, *arguments)` runs `function(rank, world, *arguments)` on `world` gloo ranks.

    The ranks are forked from this process, which has imported torch: 0.1 s instead of 7 s. Returns their results
    (picklable) by rank; the first rank's traceback becomes the failure. Closures work.
    """
    pytest.importorskip("torch")
    # Imported before the fork, so that the ranks have it.
    for module in _NEEDED_BY_RANKS:
        import_module(module)

    def run(function, world, *arguments, timeout=120):
        context = multiprocessing.get_context("fork")
        processes, pipes, stacks = [], [], [tempfile.TemporaryFile() for _ in range(world)]  # noqa: SIM115
        with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                how = function, rank, world, listener, arguments, theirs, stacks[rank]
                process = context.Process(target=_rank_main, args=how)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
        deadline = time.monotonic() + timeout
        results, failure = [], None
        for rank, pipe in enumerate(pipes):
            try:
                left = max(deadline - time.monotonic(), 0)
                if pipe.poll(left):
                    ok, value = pipe.recv()
                else:
                    ok, value = False, f"no answer within {timeout} s\n{_stacks_of(processes, stacks)}"
            except EOFError:
                ok, value = False, "died without a word"
            if not ok:
                failure = f"rank {rank} of {world}: {value}"
                break
            results.append(value)
        for process in processes:
            if failure:
                process.kill()
            process.join(10)
        if failure:
            pytest.fail(failure, pytrace=False)
        return results

    return run


@pytest.fixture(scope="session")
def transformers_twin():
    """`twin, ours = transformers_twin(arch, model)`: the reference implementation of `transformers` in float64 with the
    weights of our `model`, and `ours(tensors)`, which takes tensors by its names (parameters, gradients) and returns
    them by our names, in our shapes."""
    import torch

    def twin_of(arch, model):
        theirs = _transformers_model(arch)
        state, by_their_names = model.state_dict(), theirs.state_dict()
        with torch.no_grad():
            for tensor in by_their_names.values():
                tensor.fill_(torch.nan)
            for name, tensor in state.items():
                counterpart = _counterpart(name, by_their_names)
                counterpart.copy_(tensor.view_as(counterpart))
        assert not any(tensor.isnan().any() for tensor in by_their_names.values())
        shapes = {name: p.shape for name, p in model.named_parameters()}
        return theirs.eval(), lambda theirs: {n: _counterpart(n, theirs).reshape(shapes[n]) for n in shapes}

    return twin_of


def _transformers_model(arch):
    import transformers

    name, own = _transformers_class(arch)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=arch.vocab_size,
        hidden_size=arch.d_model,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads,
        num_key_value_heads=arch.num_kv_heads,
        max_position_embeddings=arch.max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": arch.rope_theta},
        rms_norm_eps=arch.norm_eps,
        tie_word_embeddings=arch.tied_embeddings,
        attn_implementation="sdpa",
        experts_implementation="eager",
        **({"intermediate_size": arch.d_ffn, "head_dim": arch.head_dim} | own),
    )
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).double()
    # The reference takes norms and scores in float32 whatever the model's dtype; in float64 a missing small term would
    # show.
    for module in theirs.modules():
        if type(module).__name__.endswith(("RMSNorm", "Router")):
            module.forward = partial(_in_float64, module.forward)
    return theirs


def _transformers_class(arch):
    """Return the name of the reference class for `arch`, and the keys of its configuration that others lack."""
    moe, mla = arch.moe, arch.mla
    window = {"sliding_window": arch.sliding_window or None}
    if arch.is_mla:
        return "DeepseekV3", {
            "head_dim": mla.rope_dim, "q_lora_rank": mla.q_rank or None, "kv_lora_rank": mla.kv_rank,
            "qk_nope_head_dim": mla.nope_dim, "qk_rope_head_dim": mla.rope_dim, "v_head_dim": mla.v_dim,
            "rope_interleave": False, "n_routed_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.d_expert, "n_shared_experts": moe.shared_experts,
            "first_k_dense_replace": moe.first_dense, "norm_topk_prob": moe.normalize, "n_group": moe.groups,
            "topk_group": moe.top_groups, "routed_scaling_factor": moe.scale,
        }  # fmt: skip
    if arch.is_moe and arch.qk_norm:
        return "Qwen3Moe", window | {
            "use_sliding_window": arch.sliding_window > 0, "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_expert, "norm_topk_prob": moe.normalize,
            "mlp_only_layers": list(range(moe.first_dense)),
        }  # fmt: skip
    if arch.is_moe:
        return "Mixtral", window | {
            "intermediate_size": moe.d_expert, "num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
        }  # fmt: skip
    if arch.qk_norm:
        return "Qwen3", window | {"use_sliding_window": arch.sliding_window > 0, "max_window_layers": 0}
    return ("Mistral", window) if arch.sliding_window else ("Llama", {})


def _in_float64(forward, x):
    """`forward(x)` with float64 wherever it asks for float32."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Wide(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            wide = [torch.float64 if value is torch.float32 else value for value in args]
            named = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
            return func(*wide, **named) if func is not torch.Tensor.float else args[0].double()

    with Wide():
        return forward(x)


def _counterpart(ours: str, theirs):
    """The part of their tensors that our parameter is; a view, of a stack of experts [E, out, in]."""
    outside = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    latent = {"q_down": "q_a_proj", "q_latent_norm": "q_a_layernorm", "q_up": "q_b_proj",
              "kv_down": "kv_a_proj_with_mqa", "kv_latent_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}  # fmt: skip
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    match ours.removesuffix(".weight").split("."):
        case ["blocks", layer, "moe", "experts", part]:
            experts = f"model.layers.{layer}.mlp.experts"
            if part == "down":
                return theirs[f"{experts}.down_proj"]
            return theirs[f"{experts}.gate_up_proj"].chunk(2, dim=1)[("gate", "up").index(part)]
        case ["blocks", layer, "moe", "router", "bias"]:
            return theirs[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        case ["blocks", layer, "moe", "router"]:
            inside = "mlp.gate"
        case ["blocks", layer, "moe", "shared", part]:
            inside = f"mlp.shared_experts.{part}_proj"
        case ["blocks", layer, "attention", part]:
            inside = "self_attn." + latent.get(part, part if part.endswith("norm") else f"{part}_proj")
        case ["blocks", layer, "mlp", part]:
            inside = f"mlp.{part}_proj"
        case ["blocks", layer, norm]:
            inside = norms[norm]
        case [part]:
            return theirs[f"{outside[part]}.weight"]
        case _:
            raise KeyError(ours)
    return theirs[f"model.layers.{layer}.{inside}.weight"]
