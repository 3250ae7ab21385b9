"""What is checked before any process starts: what would otherwise fail minutes later, on every rank. No torch."""

import importlib.util
from collections.abc import Callable

from ingot.checkpoint.manifest import list_checkpoints
from ingot.errors import ConfigError, IngotError, MissingPartError
from ingot.loader.reader import check_vocabulary
from ingot.machine.facts import find_gpus, usable_cores
from ingot.schema.layout import RunFolder
from ingot.schema.run import RunConfig
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.storage import require_free
from ingot.theory.memory import checkpoint_bytes


def preflight(folder: RunFolder, config: RunConfig, say: Callable[[str], None]) -> TokenManifest:
    """The manifest of the training tokens, when the run can start. Raises the IngotError that says why it cannot."""
    for package in ("torch", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise MissingPartError(
                f"training needs the package {package!r}, which is not installed", fix="pip install 'ingot[train]'"
            )
    tokens = _checked_tokens(folder, config, "data.tokens", config.data.tokens)
    if config.data.heldout:
        _checked_tokens(folder, config, "data.heldout", config.data.heldout)
    _check_devices(config, say)
    _check_disk(folder, config)
    return tokens


def _checked_tokens(folder: RunFolder, config: RunConfig, key: str, value: str) -> TokenManifest:
    try:
        manifest = read_token_manifest((folder.root / value).resolve())
        check_vocabulary(manifest, config.model.vocab_size)
    except IngotError as error:
        error.found = f"{key}: {error.found}"
        raise
    return manifest


def _check_devices(config: RunConfig, say: Callable[[str], None]) -> None:
    ranks = config.parallel.world_size
    gpus = () if config.train.device == "cpu" else find_gpus()
    if (gpus or config.train.device == "cuda") and len(gpus) < ranks:
        raise ConfigError(
            f"parallel.dp_shard={config.parallel.dp_shard} needs {ranks} GPUs, this machine offers {len(gpus)}",
            rule="one process per GPU",
            fix=f"--set parallel.dp_shard={max(len(gpus), 1)}, or --set train.device=cpu",
        )
    if not gpus and ranks > usable_cores():
        say(f"note: {ranks} ranks share {usable_cores()} cores; parallel.dp_shard={usable_cores()} would be faster")


def _check_disk(folder: RunFolder, config: RunConfig) -> None:
    """Room for all checkpoints that will lie there at once: `keep`, and the one being written."""
    one = round(checkpoint_bytes(config.model, config.train.precision).value)
    there = sum(listed.bytes for listed in list_checkpoints(folder.checkpoints))
    needed = one * (config.checkpoint.keep + 1) - there
    require_free(folder.checkpoints, max(needed, 0), f"{config.checkpoint.keep + 1} checkpoints")
