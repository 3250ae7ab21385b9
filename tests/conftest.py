"""What every test may use: real data when it is at hand, ranks forked from this process, a model nobody here wrote."""

import multiprocessing
import os
import time
import traceback
from functools import partial
from pathlib import Path

import pytest

# One thread per process: forked ranks share two cores, and results stay the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real crawl files and text with ground truth; set INGOT_TEST_DATA to their folder."""
    folder = os.environ.get("INGOT_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real data: set INGOT_TEST_DATA to its folder")
    return Path(folder)


def _rank_main(function, rank, world, store, arguments, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        from datetime import timedelta

        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        result = function(rank, world, *arguments)
        dist.barrier()
        pipe.send((True, result))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # no atexit handlers of the parent's pytest


@pytest.fixture
def fork_ranks(tmp_path):
    """`fork_ranks(function, world, *arguments)` runs `function(rank, world, *arguments)` on `world` gloo ranks.

    The ranks are forked from this process, which has imported torch: 0.1 s instead of 7 s. Returns their results
    (picklable) by rank; the first rank's traceback becomes the failure. Closures work.
    """
    import torch.distributed  # noqa: F401  (imported before the fork, so that the ranks have it)

    runs = iter(range(10_000))

    def run(function, world, *arguments, timeout=120):
        context = multiprocessing.get_context("fork")
        store = str(tmp_path / f"ranks-{next(runs)}")
        processes, pipes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(function, rank, world, store, arguments, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        deadline = time.monotonic() + timeout
        results, failure = [], None
        for rank, pipe in enumerate(pipes):
            try:
                left = max(deadline - time.monotonic(), 0)
                ok, value = pipe.recv() if pipe.poll(left) else (False, f"no answer within {timeout} s")
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
    """`twin, names = transformers_twin(arch, model)`: the reference implementation of `transformers` in float64 with
    the weights of our `model`, and what it calls each of our parameters."""

    def twin_of(arch, model):
        names = {name: _transformers_name(name) for name, _ in model.named_parameters()}
        theirs = _transformers_model(arch)
        missing, unexpected = theirs.load_state_dict({names[n]: p for n, p in model.state_dict().items()}, strict=False)
        assert not unexpected and set(missing) <= ({"lm_head.weight"} if arch.tied_embeddings else set())
        theirs.tie_weights()
        return theirs.eval(), names

    return twin_of


def _transformers_model(arch):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config, model = (Qwen3Config, Qwen3ForCausalLM) if arch.qk_norm else (LlamaConfig, LlamaForCausalLM)
    theirs = model(
        config(
            vocab_size=arch.vocab_size,
            hidden_size=arch.d_model,
            intermediate_size=arch.d_ffn,
            num_hidden_layers=arch.num_layers,
            num_attention_heads=arch.num_heads,
            num_key_value_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            max_position_embeddings=arch.max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": arch.rope_theta},
            rms_norm_eps=arch.norm_eps,
            tie_word_embeddings=arch.tied_embeddings,
            attn_implementation="sdpa",
        )
    ).double()
    # The reference takes its norms in float32 whatever the model's dtype; in float64 a missing small term would show.
    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_wide_norm, module)
    return theirs


def _wide_norm(module, x):
    return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def _transformers_name(ours: str) -> str:
    outside = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    match ours.removesuffix(".weight").split("."):
        case ["blocks", layer, "attention", part]:
            inside = "self_attn." + (part if part.endswith("norm") else f"{part}_proj")
        case ["blocks", layer, "mlp", part]:
            inside = f"mlp.{part}_proj"
        case ["blocks", layer, norm]:
            inside = norms[norm]
        case [part]:
            return f"{outside[part]}.weight"
        case _:
            raise KeyError(ours)
    return f"model.layers.{layer}.{inside}.weight"
