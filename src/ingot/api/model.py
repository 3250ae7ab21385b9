"""A trained model in this process: `ingot.load_model`, `ingot.evaluate` and `ingot.export`. Functions import torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ingot.api.run import Run, folder_of
from ingot.errors import require

if TYPE_CHECKING:
    import torch

    from ingot.schema.run import RunConfig
    from ingot.tokenizer.encoder import Encoder
    from ingot.trainer.background_eval.scores import TaskScores
    from ingot.trainer.evaluate import Evaluation
    from ingot.trainer.export.huggingface import Exported
    from ingot.trainer.model.transformer import Transformer
    from ingot.trainer.trained import Trained

DeviceName = Literal["auto", "cpu", "cuda"]


class LanguageModel:
    """The model of a checkpoint, ready to score and generate text; `load_model` makes it.

    `model.module(tokens)` is the torch module: token ids int64 [B, T] to logits [B, T, V].
    """

    def __init__(self, trained: "Trained"):
        self._trained = trained

    @property
    def config(self) -> "RunConfig":
        """The settings of the run that trained the model."""
        return self._trained.config

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._trained.step

    @property
    def device(self) -> "torch.device":
        return self._trained.device

    @property
    def module(self) -> "Transformer":
        """The torch module, in the compute dtype of its run, on `device`."""
        return self._trained.model

    @property
    def tokenizer(self) -> "Encoder | None":
        """The tokenizer, with `encode(text)` and `decode(ids)`; None if the run file names none."""
        return self._trained.encoder

    def evaluate(self, tokens: str | Path | None = None, max_tokens: int | None = None) -> "Evaluation":
        """Return bits per byte of held-out text; the arguments and errors are those of `ingot.evaluate`."""
        from ingot.trainer import trained

        return trained.evaluate_trained(self._trained, Path(tokens) if tokens is not None else None, max_tokens)

    def score_tasks(self, tasks: Sequence[str], *, folder: str | Path | None = None, examples: int = 0) -> "TaskScores":
        """Return the scores of the model on tasks of lm-eval (pip install 'ingot[eval]').

        folder: a folder of task files (YAML) besides the tasks of lm-eval. examples: of each task, at most; 0: all.
        Raises UsageError for a task that there is not, MissingPartError without lm-eval.

            model.score_tasks(["arc_easy"], examples=100).scores["arc_easy"]["acc"]
        """
        from ingot.trainer.background_eval import scores

        return scores.score_tasks(self._trained, tasks, Path(folder) if folder is not None else None, examples)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 0,
    ) -> list[str]:
        """Return the continuation of each prompt, up to the end-of-text token or `max_tokens` tokens.

        temperature: 0 takes the most likely token, 1 samples from the model's distribution. top_k: sample from the k
        most likely tokens; 0: from all. The same seed gives the same text. Raises ConfigError if the run names no
        tokenizer.

            model.generate("The function returns", max_tokens=20, temperature=0.0)
        """
        from ingot.trainer import trained

        texts = [prompts] if isinstance(prompts, str) else prompts
        return trained.sample_trained(
            self._trained, texts, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed
        )

    def __repr__(self) -> str:
        return f"LanguageModel({self.config.name!r}, step {self.step}, {self.device})"


def load_model(run: str | Path | Run, device: DeviceName = "auto") -> LanguageModel:
    """Load and verify a checkpoint: the newest of a run, or the checkpoint folder that `run` names.

    device: "auto" uses a GPU if there is one. Raises CheckpointError for a damaged checkpoint, or a run without one,
    ConfigError for a device that is not there, UsageError for a path that is not a run, MissingPartError without torch.

        model = ingot.load_model("runs/demo", device="cpu")
        model.generate("The", max_tokens=20)
    """
    require("torch", "train")
    from ingot.trainer import trained

    return LanguageModel(trained.load_trained(folder_of(run), device))


def evaluate(
    run: str | Path | Run | LanguageModel,
    *,
    tokens: str | Path | None = None,
    max_tokens: int | None = None,
    device: DeviceName = "auto",
) -> "Evaluation":
    """Return bits per byte of a model on held-out text, in total and by source, with a unigram model for comparison.

    run: a run, a checkpoint folder, or a loaded model. tokens: a token folder (default: data.heldout of the run).
    max_tokens: score about so many tokens, the same number per source (default: evaluate.max_tokens of the run).
    Raises ConfigError if the run names no held-out tokens, or if they were made with another tokenizer; and the errors
    of `load_model`.

        ingot.evaluate("runs/demo").total.bpb
    """
    model = run if isinstance(run, LanguageModel) else load_model(run, device)
    return model.evaluate(tokens, max_tokens)


def export(run: str | Path | Run, out: str | Path, *, dtype: Literal["float32", "bfloat16"] = "float32") -> "Exported":
    """Write a checkpoint as a Hugging Face model folder, read it back, and compare the logits of both.

    run: a run (its newest checkpoint or weights), or the folder of one. out: the folder to write; an earlier export in
    it is replaced. dtype: of the stored weights. Raises UsageError if `out` is another folder that is not empty,
    CheckpointError if the checkpoint is damaged or the logits differ by more than 1e-5; nothing is then written.

        exported = ingot.export("runs/demo", "demo-hf")
        exported.path, exported.max_logit_difference
    """
    require("torch", "train")
    from ingot.trainer.export import huggingface

    return huggingface.export_run(folder_of(run), Path(out), dtype=dtype)
