"""ingot: from raw crawl files to a trained language model.

Every name below is imported when it is first used, so that `import ingot` is instant. docs/api.md shows them in use.
"""

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the import of typing, which would take most of the time
if TYPE_CHECKING:
    from ingot.api.building import build_data
    from ingot.api.checking import check
    from ingot.api.corpus import Corpus
    from ingot.api.dedup import Deduper
    from ingot.api.model import evaluate, export, load_model
    from ingot.api.pages import extract, is_english, passes_quality, read_warc, read_wet
    from ingot.api.run import Run, load_run
    from ingot.api.running import resume, train
    from ingot.api.shards import tokenize_to_shards
    from ingot.api.sizing import chinchilla_optimal, memory_per_gpu, recommend_config
    from ingot.api.tokens import TokenDataset
    from ingot.api.trainer import Trainer
    from ingot.planner.request.planning import plan

__version__ = "0.1.0"

# The public names, by the module that defines them. tests/unit/public_names.txt has their signatures.
_NAMES = {
    "ingot.planner.request.planning": ("plan",),
    "ingot.api.building": ("build_data",),
    "ingot.api.checking": ("check",),
    "ingot.api.corpus": ("Corpus",),
    "ingot.api.dedup": ("Deduper",),
    "ingot.api.model": ("evaluate", "export", "load_model"),
    "ingot.api.pages": ("extract", "is_english", "passes_quality", "read_warc", "read_wet"),
    "ingot.api.run": ("Run", "load_run"),
    "ingot.api.running": ("resume", "train"),
    "ingot.api.shards": ("tokenize_to_shards",),
    "ingot.api.sizing": ("chinchilla_optimal", "memory_per_gpu", "recommend_config"),
    "ingot.api.tokens": ("TokenDataset",),
    "ingot.api.trainer": ("Trainer",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "__version__",
    "Corpus",
    "Deduper",
    "Run",
    "TokenDataset",
    "Trainer",
    "build_data",
    "check",
    "chinchilla_optimal",
    "evaluate",
    "export",
    "extract",
    "is_english",
    "load_model",
    "load_run",
    "memory_per_gpu",
    "passes_quality",
    "plan",
    "read_warc",
    "read_wet",
    "recommend_config",
    "resume",
    "tokenize_to_shards",
    "train",
]


def __getattr__(name: str):
    """Import a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
