"""What is checked before any process starts: what would otherwise fail minutes later, on every rank. No torch."""

import importlib.util
from collections.abc import Callable

from ingot.errors import ConfigError, IngotError, MissingPartError
from ingot.hub.config_file import require_fit
from ingot.machine.facts import find_gpus, usable_cores
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest, check_vocabulary, read_token_manifest
from ingot.storage import require_free
from ingot.theory.layout import require_layout
from ingot.theory.memory import checkpoint_bytes
from ingot.trainer.checkpoint.manifest import candidate_folders, list_checkpoints


def preflight(folder: RunFolder, config: RunConfig, say: Callable[[str], None]) -> TokenManifest:
    """The manifest of the training tokens, when the run can start. Raises the IngotError that says why it cannot."""
    for package in ("torch", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise MissingPartError(
                f"training needs the package {package!r}, which is not installed", fix="pip install 'ingot[train]'"
            )
    require_layout(config)
    if config.init and not candidate_folders(folder.checkpoints):
        require_fit((folder.root / config.init).resolve(), config.model)
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
            f"{_degrees(config)} needs {ranks} GPUs, this machine offers {len(gpus)}",
            rule="one process per GPU",
            fix=f"{_fewer(config, max(len(gpus), 1))}, or --set train.device=cpu",
        )
    if not gpus and ranks > usable_cores():
        say(f"note: {ranks} ranks share {usable_cores()} cores; {usable_cores()} ranks would be faster")


def _degrees(config: RunConfig) -> str:
    """The degrees above 1: "parallel.pp=2 x parallel.tp=4"."""
    named = {name: getattr(config.parallel, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    return " x ".join(f"parallel.{name}={n}" for name, n in named.items() if n > 1) or "parallel.dp_shard=1"


def _fewer(config: RunConfig, ranks: int) -> str:
    only_shards = config.parallel.world_size == config.parallel.dp_shard
    return f"--set parallel.dp_shard={ranks}" if only_shards else f"degrees that multiply to at most {ranks}"


def _check_disk(folder: RunFolder, config: RunConfig) -> None:
    """Room for all checkpoints that will lie there at once: `keep`, and the one being written."""
    one = round(checkpoint_bytes(config.model, config.train.precision).value)
    there = sum(listed.bytes for listed in list_checkpoints(folder.checkpoints))
    needed = one * (config.checkpoint.keep + 1) - there
    require_free(folder.checkpoints, max(needed, 0), f"{config.checkpoint.keep + 1} checkpoints")
