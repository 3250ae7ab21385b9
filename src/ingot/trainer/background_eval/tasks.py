"""The model of a checkpoint as lm-eval calls it. This module imports lm-eval, which is in the extra `eval`.

Shape letters: B rows, T tokens, V vocab_size.
"""

# pyright: reportMissingImports=false
# An extra of its own, which the check of types does not need.
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from ingot.errors import ConfigError, UsageError
from ingot.tokenizer.encoder import Encoder
from ingot.trainer.loader.reader import document_numbers
from ingot.trainer.model.generate import cached, choose_token
from ingot.trainer.trained import Trained

_LOGIT_BYTES = 1 << 28  # of the logits of a batch, in float32
_NEW_TOKENS = 256  # of a continuation whose task names no number, as in lm-eval
_BOOTSTRAPS = 100  # of standard errors that have no formula


def run_tasks(trained: Trained, tasks: Sequence[str], folder: Path | None, examples: int) -> dict[str, Any]:
    """Return the results of lm-eval. Arguments and errors as of `score_tasks` (scores.py)."""
    manager = _manager(tasks, folder)
    model = TaskModel(trained)
    with torch.no_grad():
        found: Any = simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=manager,
            limit=examples or None,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
        )
    return found


def _manager(tasks: Sequence[str], folder: Path | None) -> TaskManager:
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(
                "E-EVAL-TASK-FOLDER",
                f"{folder} is not a folder",
                rule="a task folder has task files of lm-eval (YAML)",
                fix="correct evaluate.background.task_folder, or --task-folder",
                path=str(folder),
            )
        alone = TaskManager(include_path=folder, include_defaults=False)  # to read all those of lm-eval takes seconds
        if set(tasks) <= set(alone.all_tasks):
            return alone
    manager = TaskManager(include_path=folder)
    for task in tasks:
        if task not in manager.all_tasks:
            near = get_close_matches(task, manager.all_tasks, 3)
            raise UsageError(
                "E-EVAL-TASK-UNKNOWN",
                f"{task!r} is no task of lm-eval" + (f", nor of {folder}" if folder else ""),
                rule="a task has a name that `lm-eval ls tasks` lists, or is in a file of the task folder",
                fix=f"the nearest names are {', '.join(near)}" if near else "list the names: lm-eval ls tasks",
                task=task,
                nearest=near,
            )
    return manager


class TaskModel(TemplateLM):
    """A trained model as lm-eval calls it, in one process."""

    def __init__(self, trained: Trained):
        super().__init__()
        if trained.encoder is None:
            raise ConfigError(
                "E-TOKENIZER-UNSET",
                f"{trained.folder.config} names no data.tokenizer",
                rule="the text of tasks is encoded with the tokenizer of the training tokens",
                fix="set data.tokenizer in the run file",
                needed_for="tasks",
            )
        self._trained, self._encoder = trained, trained.encoder
        self._positions = trained.config.model.max_seq_len

    @property
    def encoder(self) -> Encoder:
        return self._encoder

    @property
    def eot_token_id(self) -> int:
        return self._encoder.eot_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._encoder.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, in nats, and whether each of its tokens is the most likely.
        Of texts longer than the model's positions, the beginning is left out."""
        rows = [(context + target)[-self._positions - 1 :] for _, context, target in requests]
        counts = [min(len(target), len(row) - 1) for row, (*_, target) in zip(rows, requests, strict=True)]
        found = [(0.0, True)] * len(rows)
        for batch in self._batches([len(row) for row in rows]):
            logits_BTV = self._logits([rows[number][:-1] for number in batch])
            for logits_TV, number in zip(logits_BTV, batch, strict=True):
                end, count = len(rows[number]) - 1, counts[number]
                if count < 1:
                    continue
                targets_T = torch.tensor(rows[number][-count:], device=logits_TV.device)
                kept_TV = _wide(logits_TV[end - count : end])
                nats = kept_TV.log_softmax(-1).gather(1, targets_T[:, None]).sum()
                found[number] = float(nats), bool((kept_TV.argmax(-1) == targets_T).all())
        return found

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of rows that are computed together: the longest first, which need most memory."""
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        row_bytes = 4 * self._trained.config.model.vocab_size
        while order:
            size = max(_LOGIT_BYTES // (row_bytes * max(lengths[order[0]], 1)), 1)
            yield order[:size]
            order = order[size:]

    def _logits(self, rows: Sequence[list[int]]) -> Tensor:
        """Return the logits [B, T, V] of rows of tokens, each padded at its end, which does not change the rest."""
        ids_BT = np.full((len(rows), max(map(len, rows), default=0) or 1), self.eot_token_id)
        for row, ids in zip(ids_BT, rows, strict=True):
            row[: len(ids)] = ids
        documents = None
        if self._trained.config.data.mask_documents:
            documents = torch.from_numpy(document_numbers(ids_BT, self.eot_token_id)).to(self._trained.device)
        return self._trained.model(torch.from_numpy(ids_BT).to(self._trained.device), None, documents)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in nats: every token once, in windows of all positions."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self._positions, 1):
                windows.append(("", *make_disjoint_window(window)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += nats
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text, up to the first of its stop texts."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else [text for text in until if text]
        most = min(int(settings.get("max_gen_toks", _NEW_TOKENS)), self._positions - 1)
        temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
        generator = torch.Generator().manual_seed(self._trained.config.seed)
        ids = (self.tok_encode(context) or [self.eot_token_id])[most - self._positions :]
        next_logits, new = cached(self._trained.model, self._trained.config.model, self._positions), list[int]()
        text = ""
        while len(new) < most:
            token = choose_token(next_logits([*ids, *new]), temperature, 0, generator)
            if token == self.eot_token_id:
                break
            new.append(token)
            text = self._encoder.decode(new)
            if ends := [at for stop in stops if (at := text.find(stop)) >= 0]:
                return text[: min(ends)]
        return text


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
