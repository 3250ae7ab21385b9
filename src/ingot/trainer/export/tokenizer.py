"""The tokenizer of a Hugging Face folder: our tokenizer.json byte for byte, and what transformers wants beside it."""

import json
import shutil
from pathlib import Path

from ingot.errors import DataError
from ingot.schema.run import Data
from ingot.schema.tokens import TokenManifest
from ingot.storage import sha256_file, write_json


def tokenizer_file(run: Path, data: Data) -> Path:
    """data.tokenizer, or the tokenizer.json that a data build leaves beside its token folders."""
    return run / data.tokenizer if data.tokenizer else run / Path(data.tokens).parent / "tokenizer.json"


def write_tokenizer(folder: Path, tokenizer: Path, tokens: TokenManifest, max_seq_len: int) -> None:
    """Copy `tokenizer` (a tokenizer.json) into `folder` with its two side files.

    Raises DataError when it is not the tokenizer that made `tokens`.
    """
    if not tokenizer.is_file():
        raise DataError(
            f"no tokenizer at {tokenizer}",
            rule="a model is exported with the tokenizer it was trained on",
            fix="set data.tokenizer in the run's run.toml to that tokenizer.json",
        )
    found_sha256 = sha256_file(tokenizer)
    if found_sha256 != tokens.tokenizer_sha256:
        raise DataError(
            f"{tokenizer} has SHA-256 {found_sha256[:12]}..., the training tokens were made with "
            f"{tokens.tokenizer_sha256[:12]}...",
            rule="a model is exported with the tokenizer it was trained on",
            fix="set data.tokenizer in the run's run.toml to that tokenizer.json",
        )
    eot = _token_text(tokenizer, tokens.eot_id)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    # Documents follow each other with EOT between them, so EOT is what a document starts after and ends with.
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
        f"{tokenizer} has no token with id {token_id}, the end-of-text token of the training tokens",
        rule="the tokenizer knows every id of the manifest",
    )
