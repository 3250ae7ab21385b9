"""The ranges of profiled steps: the parts of a step, its phases, layers, and waits for other ranks by axis and line.

They are spans of torch's profiler, or ranges of NVTX for a profiler outside of the process (Nsight Systems).
"""

import contextlib
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import ingot
from ingot.rehearse.profile.trace import LAYER, RANGE, WAIT, Interval
from ingot.schema.metrics import ALL_RANKS
from ingot.trainer.mesh.axis_traffic import axis_of_group
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.mesh.step_times import StepPhase, StepTimes
from ingot.trainer.mesh.waiting import WaitClock
from ingot.trainer.parts import RunParts

_PACKAGE = Path(ingot.__file__).parent
_TORCH = str(Path(torch.__file__).parent)
# Files of ingot through which others wait: the line that matters is the one that calls them.
_PASSED = tuple(
    str(_PACKAGE / one)
    for one in (
        "trainer/mesh/waiting.py",
        "trainer/mesh/collectives.py",
        "rehearse/profile",
        "trainer/torch_private.py",
    )
)


class Ranges:
    """Named ranges. nvtx: they are those of NVTX, whose functions `push` and `pop` are."""

    def __init__(
        self,
        nvtx: bool = False,
        push: Callable[[str], object] = torch.cuda.nvtx.range_push,
        pop: Callable[[], object] = torch.cuda.nvtx.range_pop,
    ):
        self._nvtx, self._push, self._pop = nvtx, push, pop

    def open(self, name: str) -> Any:
        """Begin a range, and return what `close` takes. Ranges of a thread are closed in reverse order."""
        if self._nvtx:
            self._push(name)
            return None
        opened = torch.profiler.record_function(name)
        opened.__enter__()
        return opened

    def close(self, opened: Any) -> None:
        if self._nvtx:
            self._pop()
        else:
            opened.__exit__(None, None, None)

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        opened = self.open(name)
        try:
            yield
        finally:
            self.close(opened)


class RangedTimes(StepTimes):
    """The seconds of each phase, and a range for each: they are noted at the same seam."""

    def __init__(self, device: torch.device, waits: WaitClock, ranges: Ranges):
        super().__init__(device, waits)
        self._ranges = ranges

    @contextlib.contextmanager
    def phase(self, phase: StepPhase) -> Iterator[None]:
        with self._ranges.range(f"{RANGE}{phase}"), super().phase(phase):
            yield


class ObservedWaits:
    """The waits of a rank for others, as ranges, and its exchanges in flight, in seconds of time.perf_counter.

    groups: name of a process group -> axis. seconds: (axis, line) -> (number, seconds) of waits. flights: axis -> those
    that are over.
    """

    def __init__(self, mesh: Mesh, clock: WaitClock, ranges: Ranges):
        self.groups: dict[str, str] = {}
        self.seconds: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        self.flights: dict[str, list[Interval]] = defaultdict(list)
        self._mesh, self._clock, self._ranges = mesh, clock, ranges
        self._flying: dict[Any, tuple[str, float, bool]] = {}

    def began(self, handle: Any, group: dist.ProcessGroup, *, shows_end: bool) -> None:
        self._look()
        self._flying[handle] = self._axis(group), time.perf_counter(), shows_end

    def around(self, wait: Callable[..., Any], *args, **kwargs) -> Any:
        flight = self._flying.pop(args[0], None) if args else None
        traffic = self._clock.traffic
        blocking = traffic.blocking if traffic is not None else None
        axis = flight[0] if flight else self._axis(blocking) if blocking is not None else ALL_RANKS
        began = time.perf_counter()
        try:
            with self._ranges.range(f"{WAIT}{axis}"):
                return wait(*args, **kwargs)
        finally:
            ended = time.perf_counter()
            place = axis, calling_line()
            number, seconds = self.seconds[place]
            self.seconds[place] = number + 1, seconds + ended - began
            self.flights[axis].append((flight[1] if flight else began, ended))
            self._look()

    def forget(self) -> None:
        """Forget the waits, and the exchanges that are over."""
        self.seconds.clear()
        self.flights.clear()

    def _look(self) -> None:
        """Notice which exchanges are complete."""
        now = time.perf_counter()
        for handle, (axis, began, shows_end) in list(self._flying.items()):
            if shows_end and handle.is_completed():
                del self._flying[handle]
                self.flights[axis].append((began, now))

    def _axis(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        if name not in self.groups:
            self.groups[name] = axis_of_group(self._mesh, group) or ALL_RANKS
        return self.groups[name]


def calling_line() -> str:
    """Return the innermost line that is neither of torch nor of what others wait through: "trainer/step.py:93 measure".
    Of ingot, paths are those within the package; of other code, the name of the file."""
    frame = inspect.currentframe()
    outermost = frame
    while frame is not None:
        path = frame.f_code.co_filename
        is_mode = frame.f_code.co_name == "__torch_function__"  # it calls what others called
        if not is_mode and not path.startswith((_TORCH, *_PASSED, "<")):
            return _line(frame)
        outermost, frame = frame, frame.f_back
    return _line(outermost) if outermost is not None else ""


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    return f"{shown}:{frame.f_lineno} {frame.f_code.co_name}"


@contextlib.contextmanager
def ranged(trainer: RunParts, ranges: Ranges) -> Iterator[ObservedWaits]:
    """Add the ranges of phases, layers and waits to the steps of a run, while the context is entered."""
    program, clock = trainer.program, trainer.waits
    observed, times, hooks = ObservedWaits(trainer.mesh, clock, ranges), program.times, []
    opened: list[Any] = []
    for stage in trainer.model.stages.values():
        for name, block in stage.get_submodule("blocks").named_children():
            enter = _entering(opened, ranges, f"{LAYER}{name}")
            hooks.append(block.register_forward_pre_hook(enter))
            # A recomputed block may end early, by an error.
            hooks.append(block.register_forward_hook(lambda *_: ranges.close(opened.pop()), always_call=True))
    program.times = RangedTimes(trainer.place.device, clock, ranges)
    clock.observer = observed
    try:
        yield observed
    finally:
        clock.observer, program.times = None, times
        for hook in hooks:
            hook.remove()


def _entering(opened: list[Any], ranges: Ranges, name: str) -> Callable[..., None]:
    def enter(*_) -> None:
        opened.append(ranges.open(name))

    return enter


def on_clock_of(trace_begins: Sequence[float], own_begins: Sequence[float]) -> Callable[[float], float]:
    """Return the function from seconds of time.perf_counter to microseconds of the trace, by events known on both."""
    pairs = zip(trace_begins, own_begins, strict=True)
    offsets = sorted(trace - own * 1e6 for trace, own in pairs)
    offset = offsets[len(offsets) // 2]
    return lambda seconds: seconds * 1e6 + offset
