"""From a run file to everything that trains it: where data and checkpoints come to the parts of train/parts.py."""

import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from ingot.errors import ConfigError
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.checkpoint import CheckpointManifest, LedgerSegment
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest, check_vocabulary, read_token_manifest
from ingot.theory.devices import peak_flops
from ingot.theory.flops import train_flops_per_token
from ingot.theory.params import count_parameters
from ingot.tokenizer.encoder import Encoder, load_encoder
from ingot.trainer.checkpoint.loading import resume
from ingot.trainer.checkpoint.manifest import candidate_folders
from ingot.trainer.checkpoint.saving import CheckpointFacts
from ingot.trainer.evaluate import Heldout
from ingot.trainer.heldout import read_heldout, unigram_nats
from ingot.trainer.loader.history import earlier_weights
from ingot.trainer.loader.ledger import Ledger
from ingot.trainer.loader.loader import Loader
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.parts import Parts, build_parts
from ingot.trainer.resilience.policy import DefaultPolicy
from ingot.trainer.telemetry.cost import CostMeter


@dataclass(kw_only=True)
class Training(Parts):
    """The parts of a run on this rank, put together. Nothing here decides anything.

    first_step, until_step: the next one to do, and the one to stop at (the run's last, or earlier if asked for).
    tokens_per_byte: of the training text. flops_per_token, peak_flops: norm convention (theory/flops.py), of all
    devices together; None where no peak is published. segments: of the ledger so far.
    log, say: an event, a line for people; they do nothing except on rank 0.
    """

    folder: RunFolder
    place: RankInfo
    loader: Loader
    ledger: Ledger
    segments: list[LedgerSegment]
    checkpoint_facts: CheckpointFacts
    heldout: Heldout | None
    encoder: Encoder | None
    cost: CostMeter
    tokens_per_byte: float
    flops_per_token: float
    peak_flops: float | None
    first_step: int
    until_step: int
    log: Callable[..., None]
    say: Callable[[str], None]


def build(
    config: RunConfig, folder: RunFolder, place: RankInfo, *, until_step: int | None = None, say: Callable[[str], None]
) -> Training:
    """Build the model, load the newest good checkpoint of `folder` into it, and open the data where it stopped.

    Collective. Raises ConfigError, DataError or CheckpointError before anything is trained.
    """
    event_log = EventLog(folder.events)
    event_log.write(
        events.RANK_STARTED, rank=place.rank, pid=os.getpid(), host=socket.gethostname(), attempt=place.attempt
    )
    log = event_log.write if place.is_first else _silent
    tokens = data_path(folder, config.data.tokens)
    manifest = read_token_manifest(tokens)
    check_vocabulary(manifest, config.model.vocab_size)
    encoder = open_encoder(config, folder, manifest)
    check_prompts(config, encoder)

    policy = DefaultPolicy(folder, scaled_loss=config.train.precision == "fp16")
    continues = bool(candidate_folders(folder.checkpoints))
    parts = build_parts(config, place.device, folder.config.parent, policy, continues=continues)
    facts = CheckpointFacts(
        step=0,
        tokens=0,
        settings=config.training_settings(),
        config_sha256=config.training_sha256(),
        data_fingerprint=manifest.fingerprint(),
        layout=parts.mesh.layout,
    )
    restored = load_newest(parts, folder, facts, log)
    first_step = restored.step + 1 if restored else 1
    run = Training(
        **vars(parts),
        folder=folder,
        place=place,
        loader=open_loader(config, folder, tokens, parts.mesh, place.device, first_step),
        ledger=Ledger(),
        segments=list(restored.ledger) if restored else [],
        checkpoint_facts=facts,
        heldout=open_heldout(config, folder, encoder, max_tokens=config.evaluate.max_tokens),
        encoder=encoder,
        cost=CostMeter(config.cost.usd_per_hour, devices_in_use(place), folder.events),
        tokens_per_byte=manifest.tokens / max(manifest.text_bytes, 1),
        flops_per_token=train_flops_per_token(config.model, config.train.seq_len),
        peak_flops=total_peak(config, place),
        first_step=first_step,
        until_step=config.train.steps if until_step is None else min(until_step, config.train.steps),
        log=log,
        say=say if place.is_first else _silent,
    )
    log_start(run)
    return run


def load_newest(
    parts: Parts, folder: RunFolder, facts: CheckpointFacts, log: Callable[..., None]
) -> CheckpointManifest | None:
    """Load the newest checkpoint of `folder` that verifies into `parts`; None if there has never been one. Collective.

    A checkpoint that does not verify is logged, and the next older one is tried.
    """
    restored = resume(
        folder,
        parts.state,
        config_sha256=facts.config_sha256,
        data_fingerprint=facts.data_fingerprint,
        on_refused=lambda step, path, reason: log(
            events.CHECKPOINT_REFUSED, step=step, path=str(path.relative_to(folder.root)), reason=reason
        ),
    )
    if restored:
        parts.model.publish()
    return restored


def data_path(folder: RunFolder, path: str) -> Path:
    """A path of the run file, which may be relative to it."""
    return (folder.config.parent / path).resolve()


def open_loader(
    config: RunConfig, folder: RunFolder, tokens: Path, mesh: Mesh, device: torch.device, first_step: int
) -> Loader:
    return Loader(
        tokens,
        seq_len=config.train.seq_len,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        seed=config.seed,
        weights=config.data.weights,
        earlier=earlier_weights(folder, config.data.weights),
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        first_step=first_step,
        last_step=config.train.steps,
        device=device,
        mask_documents=config.data.mask_documents,
        prefetch=config.data.prefetch,
    )


def open_encoder(config: RunConfig, folder: RunFolder, manifest: TokenManifest) -> Encoder | None:
    """The run's tokenizer, which must be the one that made its tokens. Raises ConfigError."""
    if not config.data.tokenizer:
        if config.evaluate.prompts:
            raise ConfigError("evaluate.prompts are given, but no data.tokenizer", fix="name the tokenizer.json")
        return None
    path = data_path(folder, config.data.tokenizer)
    encoder = load_encoder(path, eot=manifest.eot_id)
    if encoder.sha256 != manifest.tokenizer_sha256:
        raise ConfigError(
            f"data.tokenizer = {path} is not the tokenizer that encoded {config.data.tokens}",
            rule="samples and bytes are decoded with the tokenizer of the training tokens",
            fix="name the tokenizer.json that the tokens were built with",
        )
    return encoder


def check_prompts(config: RunConfig, encoder: Encoder | None) -> None:
    """Samples are drawn after the last step: a prompt that does not fit has to be known before the first."""
    if encoder is None:
        return
    positions, wanted = config.model.max_seq_len, config.evaluate.sample_tokens
    for prompt in config.evaluate.prompts:
        own = max(len(encoder.encode(prompt)), 1)
        if own + wanted > positions:
            raise ConfigError(
                f"evaluate.prompts: {prompt[:40]!r} has {own} tokens, and {wanted} more are to follow",
                rule=f"the model has {positions} positions (model.max_seq_len)",
                fix="shorten the prompt or lower evaluate.sample_tokens",
            )


def open_heldout(
    config: RunConfig, folder: RunFolder, encoder: Encoder | None, *, tokens: Path | None = None, max_tokens: int
) -> Heldout | None:
    """The held-out text of the run file, or of the token folder `tokens`; None if there is neither.

    Raises ConfigError for tokens of another tokenizer than the training tokens'.
    """
    if tokens is None:
        if not config.data.heldout:
            return None
        tokens = data_path(folder, config.data.heldout)
    manifest, train_path = read_token_manifest(tokens), data_path(folder, config.data.tokens)
    train = read_token_manifest(train_path)
    if manifest.tokenizer_sha256 != train.tokenizer_sha256:
        raise ConfigError(
            f"the tokens in {tokens} were encoded with another tokenizer than data.tokens",
            rule="held-out text is scored in the tokens that the model knows",
            fix="build both from one corpus: ingot data build",
        )
    return Heldout.prepare(
        read_heldout(tokens, manifest, max_tokens, encoder),
        unigram_nats(train_path, train),
        seq_len=config.train.seq_len,
        eot_id=manifest.eot_id,
        mask_documents=config.data.mask_documents,
    )


def devices_in_use(place: RankInfo) -> int:
    """What a price per hour is multiplied with: GPUs, or one machine."""
    return place.world_size if place.device.type == "cuda" else max(place.world_size // place.local_world_size, 1)


def total_peak(config: RunConfig, place: RankInfo) -> float | None:
    """Published peak of all GPUs of the run for its precision, FLOP/s. None on a CPU or for an unknown GPU."""
    if place.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(place.device), config.train.precision)
    return peak and peak * place.world_size


def log_start(run: Training) -> None:
    config, place, facts = run.config, run.place, run.checkpoint_facts
    on_gpu = place.device.type == "cuda"
    run.log(
        events.RUN_STARTED,
        run=config.name,
        attempt=place.attempt,
        world_size=place.world_size,
        layout=run.mesh.layout | _besides_axes(run.mesh.parallel),
        device=place.device.type,
        precision=config.train.precision,
        parameters=count_parameters(config.model),
        flops_per_token=run.flops_per_token,
        peak_flops=run.peak_flops,
        versions={name: version(name) for name in ("ingot", "torch", "numpy")} | {"python": platform.python_version()},
        hardware={
            "device_name": torch.cuda.get_device_name(place.device) if on_gpu else platform.processor() or "cpu",
            "cores": len(os.sched_getaffinity(0)),
            "host": socket.gethostname(),
        },
        from_step=run.first_step - 1,
        config_sha256=facts.config_sha256,
        data_fingerprint=facts.data_fingerprint,
    )


def _besides_axes(parallel: Parallel) -> dict[str, int | str]:
    """What else a layout is told by. parallel: resolved."""
    experts: dict[str, int | str] = {"ep": parallel.ep} if parallel.ep > 1 else {}
    return experts | ({"context": parallel.context_form} if parallel.cp > 1 else {})


def _silent(*_, **__) -> None:
    """What every rank but the first does with events and lines."""
