"""ingot: from raw crawl files to a trained language model."""

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the import of typing, which would take most of the time
if TYPE_CHECKING:
    from ingot.planner.request.planning import plan

__version__ = "0.1.0"
__all__ = ["__version__", "plan"]


def __getattr__(name: str):
    """Import `ingot.plan` on first use, so that `import ingot` does not wait for the planner."""
    if name == "plan":
        from ingot.planner.request.planning import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
