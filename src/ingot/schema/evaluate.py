"""The settings `[evaluate]` of a run file: evaluation in the loop, and in the background while the run trains."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from ingot.errors import ConfigError
from ingot.ranges import Bytes, Count, Deadline, PositiveCount, PositiveQueue, Range, Share, Steps, Tokens
from ingot.schema.save_interval import NEVER, SaveInterval, parse_interval

BPB = "bpb"  # the metric of held-out text: bits per byte
_DEVICE = re.compile(r"auto|cpu|cuda:[0-9]{1,4}")


@dataclass(frozen=True, kw_only=True)
class BackgroundEvaluation:
    """Evaluation while the run trains, in a process of its own, of what the run saved: held-out bits per byte, a sample
    for each prompt, and tasks of lm-eval. Ranks never wait for it.

    every: the interval between two of them, with its unit: "60 min", "1 h", "500 steps"; "" or "0 steps": none. The
      newest save is evaluated, so checkpoint.weights_every is the shortest interval that is of use.
    share: the greatest share of the machine's time that held-out text may take, with the start of the process: at its
      first evaluation the run chooses how much of the text that is, and keeps it. Where the start alone takes more than
      half of the share, the text takes as long as the start. 0: all of it (evaluate.max_tokens).
    device: "cpu", "cuda:N", or "auto": the CPU, but in a run on GPUs a GPU of the machine that no rank uses, if there
      is one.
    threads: on the CPU. nice: the niceness of the process, from 0 to 19 (the lowest priority).
    memory_bytes: the most memory of its data; 0: half of what is available when it starts.
    seconds: an evaluation that takes longer is ended.
    tasks: names of tasks of lm-eval, which is in the extra `eval`. task_folder: a folder of task files (YAML), relative
      to the run file; "": those of lm-eval alone. task_examples: of each task, at most; 0: all.
    keep_best: "bpb", or "TASK/METRIC" like "arc_easy/acc": the full checkpoint with the best value so far is pinned,
      and only full checkpoints are evaluated. "": none is pinned.
    """

    every: str = "60 min"
    share: Share = 0.001
    device: str = "auto"
    threads: PositiveQueue = 1
    nice: Annotated[int, Range(0, 19)] = 19
    memory_bytes: Bytes = 0
    seconds: Deadline = 3600.0
    tasks: tuple[str, ...] = ()
    task_folder: str = ""
    task_examples: Count = 0
    keep_best: str = ""

    @property
    def interval(self) -> SaveInterval | None:
        """The interval between two evaluations; None without any."""
        return None if self.every in NEVER else parse_interval(self.every)

    def problems(self):
        if self.every not in NEVER:
            try:
                if parse_interval(self.every).is_auto:
                    yield "every", '"auto" is for checkpoints; give an interval, like "60 min" or "500 steps"'
            except ConfigError as error:
                yield "every", f"{error.found}; {error.rule}"
        if not _DEVICE.fullmatch(self.device):
            yield "device", f'{self.device!r} is not "auto", "cpu" or "cuda:N"'
        if len(set(self.tasks)) < len(self.tasks):
            yield "tasks", "lists a task twice"
        task, _, metric = self.keep_best.partition("/")
        if self.keep_best not in ("", BPB) and not (task in self.tasks and metric):
            yield "keep_best", f'{self.keep_best!r} is neither "bpb" nor "TASK/METRIC" with one of the tasks'


def tokens_within(budget_seconds: float, start_seconds: float, seconds_per_token: float, most: int) -> int:
    """Return how many tokens an evaluation scores, from 1 to `most`: all of it takes at most the budget, or twice its
    start, if that is more."""
    left = max(budget_seconds - start_seconds, start_seconds)
    return most if left >= most * seconds_per_token else max(int(left / seconds_per_token), 1)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluation by the ranks every `every_steps` steps (0: only at the end), while training waits: held-out bits per
    byte on at most `max_tokens` tokens, and for each prompt a sample of `sample_tokens` tokens.

    background: evaluation while training goes on.
    """

    every_steps: Steps = 0
    max_tokens: PositiveCount = 200_000
    prompts: tuple[str, ...] = ()
    sample_tokens: Tokens = 48
    background: BackgroundEvaluation = field(default_factory=BackgroundEvaluation)
