"""A job that a launcher turns into processes: local today; a batch system reads the same four facts."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Job:
    """`processes` ranks of the Python module `module` with `arguments`, each with `env` added to the environment."""

    module: str
    arguments: tuple[str, ...]
    processes: int
    env: dict[str, str] = field(default_factory=dict)
