"""ingot: from raw crawl files to a trained language model."""

TYPE_CHECKING = False  # as typing has it, whose import would be most of what `import ingot` takes
if TYPE_CHECKING:
    from ingot.planner.request.planning import plan

__version__ = "0.1.0"
__all__ = ["__version__", "plan"]


def __getattr__(name: str):
    """`ingot.plan`, when it is asked for: whoever imports ingot should not wait for the planner."""
    if name == "plan":
        from ingot.planner.request.planning import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
