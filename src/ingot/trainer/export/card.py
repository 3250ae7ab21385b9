"""The model card (README.md of an export): the model, its training data, its evaluation, and hashes."""

import re

from ingot import __version__
from ingot.events import read_events
from ingot.hub.arch_config import family_of
from ingot.plugins.layers import LAYERS
from ingot.schema.arch import Arch
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.events import EVALUATION
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest
from ingot.theory.params import count_parameters
from ingot.units import format_count

_FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- ingot\n---\n"


def model_card(
    folder: RunFolder, run: RunConfig, tokens: TokenManifest, checkpoint: CheckpointManifest, dtype: str
) -> str:
    """Return the card as Markdown. All numbers are from the run's files; sections without data are left out."""
    sections = [
        _FRONT + f"# {_plain(run.name)}",
        _introduction(run, checkpoint),
        "## Architecture\n\n" + _table(_architecture(run, dtype)),
        "## Training\n\n" + _table(_training(run, tokens, checkpoint)),
        _sources(tokens),
        _evaluation(folder, checkpoint.step),
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n'
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n```',
        "## Limits\n\nThis is a base model: it continues text, it was not taught to follow instructions or to refuse. "
        "It can repeat what its training text says, including errors and prejudice.",
        "## Provenance\n\n" + _table(_provenance(tokens, checkpoint)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _introduction(run: RunConfig, checkpoint: CheckpointManifest) -> str:
    parameters = count_parameters(run.model)
    finished = "" if checkpoint.step >= run.train.steps else f" of {run.train.steps:,} planned"
    return (
        f"A decoder-only language model with {format_count(parameters)} parameters, trained from scratch with ingot "
        f"{__version__} for {checkpoint.step:,}{finished} steps on {format_count(checkpoint.tokens)} tokens."
    )


def _architecture(run: RunConfig, dtype: str) -> list[tuple[str, str]]:
    arch = run.model
    attention = "latent attention" if arch.is_mla else "grouped-query attention"
    chosen = {key: getattr(arch, key) for key in LAYERS}
    own = [f"{key.replace('_', '-')} {name}" for key, name in chosen.items() if name != getattr(Arch, key)]
    layers = ", ".join(["pre-norm RMSNorm", f"RoPE (theta {arch.rope_theta:g})", attention, "SwiGLU"])
    kind = f"{family_of(arch).title}: {layers}{'; instead: ' if own else ''}{', '.join(own)}"
    window = [("Sliding window", f"{arch.sliding_window:,} tokens")] if arch.sliding_window else []
    return [
        ("Type", kind),
        ("Parameters", f"{count_parameters(run.model):,}" + (" (embeddings tied)" if arch.tied_embeddings else "")),
        ("Layers, width, feed-forward", f"{arch.num_layers}, {arch.d_model}, {arch.d_ffn}"),
        ("Heads: query, key/value, size", f"{arch.num_heads}, {arch.num_kv_heads}, {arch.head_dim}"),
        *window,
        *_experts(arch),
        ("Vocabulary", f"{arch.vocab_size:,}"),
        ("Context", f"{arch.max_seq_len:,} tokens (trained on {run.train.seq_len:,})"),
        ("Stored as", dtype),
    ]


def _experts(arch: Arch) -> list[tuple[str, str]]:
    moe = arch.moe
    if not arch.is_moe:
        return []
    shared = f", {moe.shared_experts} shared" if moe.shared_experts else ""
    dense = f"; the first {moe.first_dense} layers have none" if moe.first_dense else ""
    return [("Experts", f"{moe.top_k} of {moe.num_experts} for each token{shared}, width {moe.d_expert}{dense}")]


def _balance(arch: Arch) -> list[tuple[str, str]]:
    """Return the rows about load balancing and expert capacity, which are settings of training only."""
    moe = arch.moe
    kept = {
        "balance loss by sequence": moe.sequence_loss,
        "balance loss by batch": moe.global_loss,
        "router z-loss": moe.z_loss,
        "noise on router logits": moe.noise,
        "bias step": moe.bias_rate,
    }
    used = [f"{name} {value:g}" for name, value in kept.items() if value]
    rows = [("Balance of experts", ", ".join(used) or "none")] if arch.is_moe else []
    if moe.capacity_factor:
        beyond = "dropped" if moe.overflow == "drop" else "sent to one more expert, which is not in this folder"
        share = f"{moe.capacity_factor:g} times an even share of each sequence; tokens beyond were {beyond}"
        rows.append(("Capacity of experts, in training only", share))
    return rows


def _training(run: RunConfig, tokens: TokenManifest, checkpoint: CheckpointManifest) -> list[tuple[str, str]]:
    optim, schedule = run.optim, run.schedule
    clip = f", gradient norm clipped at {optim.clip_norm:g}" if optim.clip_norm else ""
    decay = f"to {schedule.final_fraction:.0%}"
    epochs = checkpoint.tokens / max(tokens.tokens, 1)
    return [
        ("Steps", f"{checkpoint.step:,} of {run.train.steps:,}"),
        ("Tokens", f"{checkpoint.tokens:,} ({epochs:.2f} times the {tokens.tokens:,} of the training set)"),
        ("Batch", f"{run.train.global_batch:,} sequences of {run.train.seq_len:,} tokens"),
        ("Optimizer", f"AdamW, betas {optim.beta1:g} and {optim.beta2:g}, weight decay {optim.weight_decay:g}{clip}"),
        ("Learning rate", f"{optim.lr:g}, {schedule.warmup_steps} warm-up steps, {schedule.kind} {decay}"),
        *_balance(run.model),
        ("Precision", run.train.precision),
        ("Seed", str(run.seed)),
    ]


def _sources(tokens: TokenManifest) -> str:
    rows = ["| Source | Documents | Tokens | Share |", "|---|---:|---:|---:|"]
    for source in tokens.sources:
        shards = [s for s in tokens.shards if s.source == source]
        count = sum(s.tokens for s in shards)
        documents = sum(s.documents for s in shards)
        rows.append(f"| {_plain(source)} | {documents:,} | {count:,} | {count / max(tokens.tokens, 1):.1%} |")
    return "## Training data\n\n" + "\n".join(rows)


def _evaluation(folder: RunFolder, step: int) -> str:
    """Return the section about the newest evaluation at this checkpoint's step; "" if there is no evaluation."""
    found = [event for event in read_events(folder.events, EVALUATION) if event.get("step") == step]
    if not found:
        return ""
    last = found[-1]
    rows = ["| Held-out text | Bits per byte | Unigram baseline |", "|---|---:|---:|"]
    rows.append(f"| all | {last['bpb']:.4f} | {last['unigram_bpb']:.4f} |")
    for source, part in sorted(last.get("by_source", {}).items()):
        rows.append(f"| {_plain(source)} | {part['bpb']:.4f} | {part['unigram_bpb']:.4f} |")
    return f"## Evaluation\n\nOn {last['tokens']:,} held-out tokens; lower is better.\n\n" + "\n".join(rows)


def _provenance(tokens: TokenManifest, checkpoint: CheckpointManifest) -> list[tuple[str, str]]:
    return [
        ("Corpus (corpus.json)", f"`{tokens.corpus_sha256}`"),
        ("Tokenizer (tokenizer.json)", f"`{tokens.tokenizer_sha256}`"),
        ("Token stream", f"`{checkpoint.data_fingerprint}`"),
        ("Run settings", f"`{checkpoint.config_sha256}`"),
    ]


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {_plain(a)} | {_plain(b)} |" for a, b in rows)])


def _plain(text: str) -> str:
    """Escape text from run files and crawls, so that the text neither becomes markup nor breaks a table."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\|\[\]*_])", r"\\\1", flat)
