"""Export a checkpoint as a Hugging Face model folder.

The written folder is read back by ingot's importer and must give the logits of the trained model. Only then is the
folder renamed to its final name.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from ingot.errors import CheckpointError, DataError, UsageError
from ingot.events import EventLog
from ingot.schema.events import EXPORTED
from ingot.schema.run import Data
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.storage import fsync_dir, require_free, sha256_file, write_atomic, write_json
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.folders import find_weights
from ingot.trainer.checkpoint.load import load_model
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.export.card import model_card
from ingot.trainer.export.model_folder import DTYPES, import_huggingface, write_model
from ingot.trainer.model.transformer import Transformer

MAX_LOGIT_DIFFERENCE = 1e-5
RECORD = "ingot.json"  # marks a folder as an export: its checkpoint, and the hashes of its files


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A finished export. path: the folder. step: the step of the checkpoint. dtype: of the stored weights. files:
    name -> size in bytes.

    max_logit_difference: largest difference between the logits of the folder, read back, and those of the trained
    weights rounded to the exported dtype. rounding_logit_difference: the same for the trained weights in fp32.
    """

    path: Path
    step: int
    dtype: str
    files: dict[str, int]
    max_logit_difference: float
    rounding_logit_difference: float

    def facts(self) -> dict:
        """Return the export as plain values: the JSON object of `ingot export --json`."""
        return asdict(self) | {"path": str(self.path)}


def export_run(
    run_or_checkpoint: Path, out: Path, *, dtype: Literal["float32", "bfloat16"] = "float32", meter: Meter = SILENT
) -> Exported:
    """Write a checkpoint or a save of the weights alone, of a run the newest of both, to `out` in Hugging Face format,
    and compare logits.

    An earlier export in `out` is replaced. meter: counts the bytes that are written. Raises UsageError if `out` is any
    other folder that is not empty, CheckpointError if the checkpoint is damaged or the written folder gives different
    logits.
    """
    folder, checkpoint = find_weights(run_or_checkpoint)
    _require_replaceable(out)
    run = load_run(folder.config)
    tokens = read_token_manifest(folder.root / run.data.tokens)
    model = Transformer(run.model)
    manifest = load_model(checkpoint, model)
    size_bytes = sum(p.numel() for p in model.parameters()) * DTYPES[dtype].itemsize
    require_free(out, size_bytes + (16 << 20), f"the export to {out}")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        write_model(temporary, run.model, model.state_dict(), eot_id=tokens.eot_id, dtype=dtype, meter=meter)
        write_tokenizer(temporary, tokenizer_file(folder.root, run.data), tokens, run.model.max_seq_len)
        difference, rounding = _prove(temporary, model, DTYPES[dtype])
        write_atomic(temporary / "README.md", model_card(folder, run, tokens, manifest, dtype))
        files = _write_record(temporary, checkpoint, manifest.step, difference)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    fsync_dir(out.parent)
    log = EventLog(folder.events)
    log.write(EXPORTED, path=str(out), max_logit_difference=difference, step=manifest.step)
    log.close()
    return Exported(
        path=out,
        step=manifest.step,
        dtype=dtype,
        files=files,
        max_logit_difference=difference,
        rounding_logit_difference=rounding,
    )


def _require_replaceable(out: Path) -> None:
    if out.name in ("", ".."):
        raise UsageError(
            "E-EXPORT-FOLDER",
            f"{out} cannot be written",
            rule="an export is written to a folder of its own",
            fix="name the folder: --out DIR",
            path=str(out),
        )
    if out.exists() and not (out.is_dir() and ((out / RECORD).is_file() or not any(out.iterdir()))):
        raise UsageError(
            "E-EXPORT-FOLDER",
            f"{out} exists and is not an earlier export",
            rule="an export replaces only an empty folder or an earlier export of ingot",
            fix="choose another --out, or remove the folder yourself",
            path=str(out),
        )


@torch.no_grad()
def _prove(written: Path, trained: Transformer, dtype: torch.dtype) -> tuple[float, float]:
    """Return the folder's largest logit differences from `trained` rounded to `dtype`, and from `trained` itself.

    All logits are computed in fp32 on fixed tokens. Raises CheckpointError if the first is above MAX_LOGIT_DIFFERENCE.
    """
    arch, state = import_huggingface(written)
    reloaded = Transformer(arch)
    reloaded.load_state_dict(state)
    exact = _logits(trained)
    if dtype == torch.float32:
        rounded = exact
    else:
        twin = Transformer(arch)
        # Router biases are not rounded; biases that only the Hugging Face class has are 0.
        expected = state | {name: b for name, b in trained.named_buffers() if name in state}
        weights = {name: p for name, p in trained.named_parameters() if name in state}
        twin.load_state_dict(expected | {name: p.to(dtype) for name, p in weights.items()})
        rounded = _logits(twin)
    found = _logits(reloaded)
    difference = (found - rounded).abs().max().item()
    if not difference <= MAX_LOGIT_DIFFERENCE:  # NaN must fail too
        raise CheckpointError(
            "E-EXPORT-LOGITS",
            f"the exported model's logits differ by {difference:.3g} from the trained model's",
            rule=f"logits differ by at most {MAX_LOGIT_DIFFERENCE:g} on the same tokens; nothing was exported",
            fix="this is a bug in ingot or a fault of the disk; please report it with the run's run.toml",
            difference=difference,
            limit=MAX_LOGIT_DIFFERENCE,
        )
    return difference, (found - exact).abs().max().item()


def _logits(model: Transformer) -> torch.Tensor:
    """Return logits [2, T, V] in fp32 for fixed token ids, which depend only on the model's shape."""
    arch = model.arch
    T = min(64, arch.max_seq_len)
    tokens_BT = (torch.arange(2 * T) * 7919 + 17).remainder(arch.vocab_size).view(2, T)
    return model.eval()(tokens_BT).float()


def _write_record(folder: Path, checkpoint: Path, step: int, difference: float) -> dict[str, int]:
    paths = sorted(folder.iterdir())
    facts = {
        "checkpoint": checkpoint.name,
        "checkpoint_manifest_sha256": sha256_file(checkpoint / "manifest.json"),
        "step": step,
        "max_logit_difference": difference,
        "files": {p.name: {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in paths},
    }
    write_json(folder / RECORD, facts)
    return {p.name: p.stat().st_size for p in paths}


def tokenizer_file(run: Path, data: Data) -> Path:
    """Return the path of data.tokenizer, or of the tokenizer.json next to the token folders of a data build."""
    return run / data.tokenizer if data.tokenizer else run / Path(data.tokens).parent / "tokenizer.json"


def write_tokenizer(folder: Path, tokenizer: Path, tokens: TokenManifest, max_seq_len: int) -> None:
    """Copy `tokenizer` (a tokenizer.json) into `folder`, and write tokenizer_config.json and special_tokens_map.json.

    Raises DataError if `tokenizer` is not the tokenizer that made `tokens`.
    """
    if not tokenizer.is_file():
        raise DataError(
            "E-TOKENIZER-UNSET",
            f"there is no tokenizer at {tokenizer}",
            rule="a model is exported with the tokenizer it was trained on",
            fix="set data.tokenizer in the run's run.toml to that tokenizer.json",
            path=str(tokenizer),
        )
    found_sha256 = sha256_file(tokenizer)
    if found_sha256 != tokens.tokenizer_sha256:
        raise DataError(
            "E-TOKENIZER-MISMATCH",
            f"{tokenizer} has SHA-256 {found_sha256[:12]}..., but the training tokens were made with "
            f"{tokens.tokenizer_sha256[:12]}...",
            rule="a model is exported with the tokenizer it was trained on",
            fix="set data.tokenizer in the run's run.toml to that tokenizer.json",
            path=str(tokenizer),
        )
    eot = _token_text(tokenizer, tokens.eot_id)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    # Documents are separated by EOT, so EOT both precedes and follows a document.
    special = {"bos_token": eot, "eos_token": eot}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    write_json(folder / "tokenizer_config.json", special | settings)
    write_json(folder / "special_tokens_map.json", special)


def _token_text(tokenizer: Path, token_id: int) -> str:
    definition = json.loads(tokenizer.read_bytes())
    for token in definition.get("added_tokens", ()):
        if token["id"] == token_id:
            return token["content"]
    vocabulary = definition.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        for text, i in vocabulary.items():
            if i == token_id:
                return text
    elif 0 <= token_id < len(vocabulary):  # Unigram: [text, score] by id
        return vocabulary[token_id][0]
    raise DataError(
        "E-TOKENIZER-NO-EOT",
        f"{tokenizer} has no token with id {token_id}, the end-of-text token of the training tokens",
        rule="the tokenizer has a token for the end-of-text id of the token manifest",
        fix="set data.tokenizer to the tokenizer.json that the tokens were built with",
        path=str(tokenizer),
        eot_id=token_id,
    )
