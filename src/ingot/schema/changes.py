"""The class of every setting of a run: what a new value means for a run that already trained, and whether it needs
confirmation. The one table of this; docs/resume.md shows it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIXTURE = "data.weights"
SKIP = "data.skip"
# Settings that are tables with free keys: each is one setting, however many entries it has.
TABLES = (MIXTURE, "optim.options", "schedule.options", "callbacks", "loss", "sinks", "plugins.code", "model.options")
UNSET = "not set"


class ChangeClass(enum.StrEnum):
    """The consequence of a new value of a setting, from harmless to impossible. Text: as `ingot train` prints it."""

    SAME_BITS = "same bits"  # logging, paths, restarts: no number depends on it
    SAME_MATHEMATICS = "same mathematics"  # the same sums in another order: differences are rounding
    OTHER_NUMBERS = "other numbers"  # another experiment from here on: needs --accept-change
    REFUSED = "refused"  # the checkpoints do not fit

    @property
    def is_free(self) -> bool:
        """True if a new value needs no confirmation."""
        return self in (ChangeClass.SAME_BITS, ChangeClass.SAME_MATHEMATICS)


_TABLE = {
    ChangeClass.SAME_BITS: {
        "": "name sinks",
        # The token stream is compared by its fingerprint, not by its path.
        "data": "tokens heldout tokenizer prefetch on_damage max_quarantined",
        "parallel": "prefetch reshard offload_folder",
        "checkpoint": "mode every every_steps keep keep_every weights_every weights_keep replicas disks",
        "checkpoint.remote": "url keep keep_every bytes_per_second",
        "evaluate": "every_steps max_tokens prompts sample_tokens",
        "evaluate.background": "every share device threads nice memory_bytes seconds tasks task_folder task_examples "
        "keep_best",
        "watch": "log_every",
        "launch": "max_restarts restart_window_seconds timeout_seconds lease_seconds stop_after grace "
        "watchdog_seconds watchdog_other_seconds watchdog_save watchdog_evaluate straggler_factor on_straggler "
        "straggler_seconds restart nodes spares node_seconds node_wait_seconds "
        "data_seconds on_bad_health health_file failures_per_node_day min_ranks shrink_seconds grow_seconds "
        "on_oom check_every check_seconds",
        "guard": "retry ask_seconds hash_every max_damages exploded_ratio sanity_every sanity_rise sanity_gap "
        "loss_ratio "
        "loss_ratio_window norm_ratio plateau_window plateau_ratio plateau_sigmas still_steps dead_ratio scale_floor "
        "scale_halvings scale_window precision_every underflow_share saturation_share",
        "cost": "usd_per_hour",
        "metrics": "record keep_steps layers_every",
        "alerts": "terminal mfu_target mfu_least communication_most throughput_least goodput_least goodput_seconds "
        "checkpoint_intervals silent_seconds disk_hours mix_drift budget_usd lines repeat_seconds most",
        "alerts.webhook": "url_env",
        "alerts.slack": "url_env",
        "alerts.alertmanager": "url_env",
        "alerts.email": "host port security sender to user_env password_env",
        "plugins": "modules folder",  # the identity of their code is compared
    },
    ChangeClass.SAME_MATHEMATICS: {
        "train": "micro_batch compile device",
        "guard": "recompute_every",  # on a GPU, with kernels that always add in the same order
        "parallel": "dp_replicate dp_shard pp cp tp ep context ulysses context_layout zero unit_layers sequence "
        "async_tp tp_chunks schedule stages_per_rank stage_layers recompute recompute_every offload offload_parameters",
    },
    ChangeClass.OTHER_NUMBERS: {
        "": "seed init callbacks loss",
        "data": "weights mask_documents skip quarantine",
        "data.filter": "ngram max_repeated max_broken",
        "train": "steps seq_len global_batch precision tf32",
        "optim": "lr beta1 beta2 eps weight_decay clip_norm options",
        "schedule": "kind warmup_steps decay_steps final_fraction options",
        "parallel": "grads reduce virtual_ranks",
        "guard": "preset window level ready settle_steps sigmas loss_spread norm_spread corruption_factor in_a_row "
        "skip_share calm_steps proven_steps lr_factor clip_factor lr_steps",
        "plugins": "code",
        # The training of experts, which adds no parameters and removes none.
        "model.moe": "noise capacity_factor sequence_loss global_loss z_loss bias_rate bias_steps",
    },
    ChangeClass.REFUSED: {
        "optim": "kind",
        "model": "vocab_size d_model num_layers num_heads num_kv_heads head_dim d_ffn max_seq_len rope_theta norm_eps "
        "qk_norm tied_embeddings sliding_window logit_softcap feed_forward norm attention block options",
        "model.moe": "num_experts top_k d_expert shared_experts first_dense scores normalize scale groups top_groups "
        "overflow",
        "model.mla": "q_rank kv_rank nope_dim rope_dim v_dim",
    },
}
# (key, class) of every setting, in the order of the table.
CLASSES = tuple(
    (f"{section}.{name}".lstrip("."), kind)
    for kind, sections in _TABLE.items()
    for section, names in sections.items()
    for name in names.split()
)
_CLASS_OF = dict(CLASSES)
# The settings of the first run files are part of a run's identity at every value. All others that need confirmation
# came later: they are part of it only if they differ from their defaults, so that older runs keep their identity. This
# list never changes.
_FIRST_SETTINGS = {
    *("seed", "data.mask_documents", "train.steps", "train.seq_len", "train.global_batch", "train.precision"),
    *("train.tf32", "optim.lr", "optim.beta1", "optim.beta2", "optim.eps", "optim.weight_decay", "optim.clip_norm"),
    *("schedule.kind", "schedule.warmup_steps", "schedule.decay_steps", "schedule.final_fraction"),
    *("model.vocab_size", "model.d_model", "model.num_layers", "model.num_heads", "model.num_kv_heads"),
    *("model.head_dim", "model.d_ffn", "model.max_seq_len", "model.rope_theta", "model.norm_eps", "model.qk_norm"),
    "model.tied_embeddings",
}
# The updates and the judgment of steps; data, batch, precision, loss and code of others change the steps themselves.
_SAME_LEVEL = ("optim.", "schedule.", "guard.")
# Settings that were free when checkpoints recorded only the others: their values in such checkpoints are unknown.
_RECORDED_LATER = ("parallel.grads", "parallel.reduce", "parallel.virtual_ranks")


@dataclass(frozen=True)
class SettingChange:
    """A setting whose value differs between a checkpoint and the run file."""

    key: str
    before: Any
    after: Any

    @property
    def kind(self) -> ChangeClass:
        return class_of(self.key)

    @property
    def keeps_level(self) -> bool:
        """True if healthy steps have the loss and the gradient norm that they had before: the guard goes on with its
        window, or it would miss the harm of a rate that is too high."""
        return self.kind.is_free or self.key in ("train.steps", SKIP) or self.key.startswith(_SAME_LEVEL)

    def __str__(self) -> str:
        return f"{self.key}   {self.before} -> {self.after}"


def changes_updates(key: str) -> bool:
    """Return whether a new value of the setting `key` changes the updates of healthy steps: those that are judged, and
    those that are passed, stay as they were."""
    return not class_of(key).is_free and key != SKIP and not key.startswith("guard.")


def class_of(key: str) -> ChangeClass:
    """Return the class of the setting `key`, like "optim.lr"; OTHER_NUMBERS for a setting of another version."""
    table = next((table for table in TABLES if key.startswith(f"{table}.")), key)
    return _CLASS_OF.get(table, ChangeClass.OTHER_NUMBERS)


def identity(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the flat `settings` that need confirmation, without later settings at their `defaults`."""
    return {
        key: value
        for key, value in settings.items()
        if not class_of(key).is_free
        and (key in _FIRST_SETTINGS or key.startswith(f"{MIXTURE}.") or value != defaults.get(key, UNSET))
    }


def compare(before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[SettingChange]:
    """Return the changed settings, sorted by key. All arguments are flat: "optim.lr" -> 0.003.

    before: the settings that a checkpoint recorded. A setting that came later had its default then, because a default
    means the behavior from before the setting. Checkpoints recorded at first only settings that need confirmation: of
    the others, and of _RECORDED_LATER, nothing is known then, and no change is returned.
    """
    records_all = "name" in before
    old, new = _with_whole_tables(before), _with_whole_tables(after)
    changes = []
    for key in sorted(old | new):
        if key not in old and not records_all and (class_of(key).is_free or key in _RECORDED_LATER):
            continue
        change = SettingChange(key, *(values.get(key, defaults.get(key, UNSET)) for values in (old, new)))
        if change.before != change.after:
            changes.append(change)
    return changes


def _with_whole_tables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with the entries of each table as one setting: "data.weights.web" is part of "data.weights"."""
    merged: dict[str, Any] = {table: {} for table in TABLES}
    for key, value in settings.items():
        table = next((table for table in TABLES if key.startswith(f"{table}.")), None)
        if table is None:
            merged[key] = value
        else:
            merged[table][key.removeprefix(f"{table}.")] = value
    return merged
