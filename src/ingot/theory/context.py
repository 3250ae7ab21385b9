"""Context parallelism in numbers: which tokens a rank has, how much causal work that is, and which form suits a run."""

from dataclasses import replace

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Train


def resolve_context(arch: Arch, train: Train, parallel: Parallel) -> Parallel:
    """`parallel` with `context` and `ulysses` decided."""
    context = "ring" if parallel.context == "auto" else parallel.context
    ulysses = {"ring": 1, "ulysses": parallel.cp}.get(context, parallel.ulysses)
    return replace(parallel, context=context, ulysses=ulysses)
