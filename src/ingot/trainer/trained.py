"""A trained model in one process, outside a training job: load, score, and sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ingot.errors import ConfigError, UsageError
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.theory.rules import load_run
from ingot.tokenizer.encoder import Encoder
from ingot.trainer.checkpoint.folders import find_weights
from ingot.trainer.checkpoint.load import load_model
from ingot.trainer.evaluate import Evaluation, evaluate, local_nats, sample_prompts
from ingot.trainer.heldout import data_path, open_encoder, open_heldout
from ingot.trainer.mesh.start import choose_device, rank_threads
from ingot.trainer.model.generate import cached, generate
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel.apply import COMPUTE


@dataclass(frozen=True)
class Trained:
    """The model of a checkpoint, and its run. encoder: the tokenizer; None if the run file names none."""

    config: RunConfig
    folder: RunFolder
    step: int
    model: Transformer
    encoder: Encoder | None
    device: torch.device


def load_trained(path: Path, device: Literal["auto", "cpu", "cuda"] = "auto", gpu: int = 0) -> Trained:
    """Load and verify a checkpoint or a save of the weights alone, of a run the newest of both, in the compute dtype of
    its run. gpu: the number of the GPU that is used, if one is.

    Raises CheckpointError for a damaged checkpoint, ConfigError for a device that is not there, or an OMP_NUM_THREADS
    that is not a number.
    """
    rank_threads(ranks=1)
    folder, checkpoint = find_weights(path)
    config = load_run(folder.config)
    chosen = choose_device(device, local_rank=gpu)
    model = Transformer(config.model).to(chosen, COMPUTE[config.train.precision])
    manifest = load_model(checkpoint, model)
    tokens = read_token_manifest(data_path(folder, config.data.tokens))
    return Trained(config, folder, manifest.step, model, open_encoder(config, folder, tokens), chosen)


def evaluate_trained(trained: Trained, tokens: Path | None = None, max_tokens: int | None = None) -> Evaluation:
    """Score the run's held-out tokens, or those in the folder `tokens`. The unigram model comes from training tokens.

    Raises ConfigError if the run names no held-out tokens, or if they were made with another tokenizer.
    """
    config, folder = trained.config, trained.folder
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(
            "E-EVAL-TOKENS",
            f"the number of tokens to score is {max_tokens}",
            rule="at least one token is scored",
            fix="pass --max-tokens N with a positive N, or leave it out",
            max_tokens=max_tokens,
        )
    heldout = open_heldout(
        config, folder, trained.encoder, tokens=tokens, max_tokens=max_tokens or config.evaluate.max_tokens
    )
    if heldout is None:
        raise ConfigError(
            "E-HELDOUT-UNSET",
            f"{folder.config} names no data.heldout",
            rule="bits per byte are measured on text that the model was not trained on",
            fix="set data.heldout, or name a token folder with --tokens DIR",
            run_file=str(folder.config),
        )
    with torch.no_grad():
        return evaluate(local_nats(trained.model), heldout, micro_batch=config.train.micro_batch, device=trained.device)


def samples_of_run(trained: Trained) -> list[tuple[str, str]]:
    """Return (prompt, continuation) for each prompt of the run file, as the ranks of the run draw it after their last
    step; none without prompts."""
    config, encoder = trained.config, trained.encoder
    if encoder is None or not config.evaluate.prompts:
        return []
    return sample_prompts(
        lambda: cached(trained.model, config.model, config.model.max_seq_len),
        config.model,
        encoder,
        config.evaluate.prompts,
        max_tokens=config.evaluate.sample_tokens,
        seed=config.seed,
    )


def sample_trained(
    trained: Trained, prompts: Sequence[str], *, max_tokens: int, temperature: float, top_k: int, seed: int
) -> list[str]:
    """Return the model's continuation of each prompt, up to the end-of-text token or `max_tokens` tokens."""
    encoder = trained.encoder
    if encoder is None:
        raise ConfigError(
            "E-TOKENIZER-UNSET",
            f"{trained.folder.config} names no data.tokenizer",
            rule="a prompt is encoded with the tokenizer of the training tokens",
            fix="set data.tokenizer in the run file",
            needed_for="prompts",
        )
    texts = []
    for prompt in prompts:
        fed = encoder.encode(prompt).tolist() or [encoder.eot_id]
        ids = generate(
            cached(trained.model, trained.config.model, len(fed) + max_tokens),
            trained.config.model,
            fed,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            stop_id=encoder.eot_id,
        )
        texts.append(encoder.decode(ids[:-1] if ids[-1] == encoder.eot_id else ids))
    return texts
