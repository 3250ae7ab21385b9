"""The names that other systems give to the tensors of a model, and ingot's tensor from theirs.

Two systems are known: Hugging Face's classes (hub/kinds.py), and torchtitan's Llama. A name may have a prefix, because
a program saves its model under a key of its own ("model."), and parts that wrappers of torch insert.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ingot.errors import CheckpointError, UsageError
from ingot.hub.kinds import huggingface_names, kind_of
from ingot.schema.arch import Arch
from ingot.trainer.export.model_folder import (
    from_huggingface,
    huggingface_rows,
    in_halves,
    in_pairs,
    tensor_shapes,
    unused_biases,
)

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
# The first parts of names that are not of a model, if the model's names have no prefix.
_OTHER_STATE = ("optimizer", "optim", "lr_scheduler", "dataloader", "train_state")
# The ends of names of tensors that a program computes from the model's settings.
_COMPUTED = ("freqs_cis", "rope_cache", "rotary_emb.inv_freq")
_TORCHTITAN_OUTSIDE = {"embed": "tok_embeddings", "norm": "norm", "head": "output"}
_TORCHTITAN_BLOCK = {
    "attention_norm": "attention_norm",
    "attention.q": "attention.wq",
    "attention.k": "attention.wk",
    "attention.v": "attention.wv",
    "attention.o": "attention.wo",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
}
_SHOWN = 8
EMBEDDING, _HUGGINGFACE_HEAD = "embed.weight", "lm_head.weight"


@dataclass(frozen=True)
class Naming:
    """The tensors of a model under the names of one system.

    names: ingot's name -> theirs, in the order in which ingot stacks them. join: makes ingot's tensor from its name and
    the tensors of their names. order: makes the rows of their tensors, one after another, from ingot's name and tensor.
    copies: their name of a tied head -> the embedding that it has to equal. zeros: names of tensors of shape
    (num_experts,) that only their model has, and zeros change nothing.
    """

    system: str
    names: Mapping[str, tuple[str, ...]]
    join: Callable[[str, Sequence[Tensor]], Tensor]
    order: Callable[[str, Tensor], Tensor]
    copies: Mapping[str, str] = field(default_factory=dict)
    zeros: Sequence[str] = ()


def namings(arch: Arch) -> list[Naming]:
    """Return the known names of the tensors of `arch`. Raises ConfigError if Hugging Face has no class for it."""
    shapes = tensor_shapes(arch)
    theirs = huggingface_names(arch, shapes)

    def from_theirs(ours: str, parts: Sequence[Tensor]) -> Tensor:
        return from_huggingface(arch, ours, parts, pairs=True)

    tied = {_HUGGINGFACE_HEAD: theirs[EMBEDDING][0]} if arch.tied_embeddings else {}
    order = partial(huggingface_rows, arch)
    found = [Naming("Hugging Face", theirs, from_theirs, order, tied, unused_biases(arch, shapes))]
    if kind_of(arch) == "llama":
        names = {ours: (_torchtitan_name(ours),) for ours in shapes}
        tied = {f"{_TORCHTITAN_OUTSIDE['head']}.weight": names[EMBEDDING][0]} if arch.tied_embeddings else {}
        join, order = partial(_from_torchtitan, arch), partial(_torchtitan_rows, arch)
        found.append(Naming("torchtitan", names, join, order, tied))
    return found


def naming_of(arch: Arch, names: str) -> Naming:
    """Return the tensors of `arch` under the names of one system: "huggingface" or "torchtitan". Raises UsageError if
    this system has no names for it, ConfigError if Hugging Face has no class for it."""
    for one in namings(arch):
        if one.system.replace(" ", "").lower() == names:
            return one
    raise UsageError(
        "E-DCP-NAMES",
        f"there are no {names} names for a model of the kind {kind_of(arch)}",
        rule="torchtitan's names are known for its Llama, Hugging Face's for every model that can be exported",
        fix="add --names huggingface",
        names=names,
        kind=kind_of(arch),
    )


def _torchtitan_name(ours: str) -> str:
    stem = ours.removesuffix(".weight")
    if not stem.startswith("blocks."):
        return f"{_TORCHTITAN_OUTSIDE[stem]}.weight"
    _, layer, stem = stem.split(".", 2)
    return f"layers.{layer}.{_TORCHTITAN_BLOCK[stem]}.weight"


def _from_torchtitan(arch: Arch, ours: str, parts: Sequence[Tensor]) -> Tensor:
    """Return ingot's tensor. torchtitan rotates neighboring rows of queries and keys together."""
    return _of_heads(arch, ours, parts[0], in_halves)


def _torchtitan_rows(arch: Arch, ours: str, tensor: Tensor) -> Tensor:
    """Return torchtitan's tensor, of ingot's."""
    return _of_heads(arch, ours, tensor, in_pairs)


def _of_heads(arch: Arch, ours: str, tensor: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `order` to the rows of each head of queries and keys."""
    if not ours.endswith(("attention.q.weight", "attention.k.weight")):
        return tensor
    return order(tensor.unflatten(0, (-1, arch.head_dim))).flatten(0, 1)


@dataclass(frozen=True)
class NamedModel:
    """The model in a state of another system. names: their clean name -> the name in the state."""

    naming: Naming
    prefix: str
    names: Mapping[str, str]

    def read(self, ours: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return ingot's tensor `ours`. read: returns a tensor by its name in the state."""
        return self.naming.join(ours, [read(self.names[theirs]) for theirs in self.naming.names[ours]])


def find_model(arch: Arch, shapes: Mapping[str, tuple[int, ...]], prefix: str | None, place: str) -> NamedModel:
    """Find the tensors of a model of `arch` among those of a state. shapes: by their names in the state.

    prefix: of the model's names; None: found. place: the state, for errors. Raises ConfigError if Hugging Face has no
    class for `arch`, CheckpointError unless exactly the tensors of one such model are there.
    """
    clean: dict[str, str] = {}
    for name in shapes:
        short = name
        for wrapper in _WRAPPERS:
            short = short.replace(wrapper, "")
        if short in clean:
            raise _no_model(place, [f"{clean[short]} and {name} are the same tensor of a model"])
        clean[short] = name
    known = namings(arch)
    ends = {naming.system: naming.names[EMBEDDING][0] for naming in known}
    candidates = [
        (naming, name.removesuffix(end))
        for naming in known
        for name in clean
        if name == (end := ends[naming.system]) or name.endswith(f".{end}")
    ]
    if prefix is not None:
        candidates = [(naming, found) for naming, found in candidates if found == prefix]
    if not candidates:
        wanted = " or ".join(f"{prefix or ''}{end} ({system})" for system, end in ends.items())
        raise _no_model(place, [f"there is no embedding {wanted}; there are {_some(clean)}"])
    if len(candidates) > 1:
        prefixes = [found for _, found in candidates]
        raise CheckpointError(
            "E-DCP-PREFIX",
            f"{place} holds {len(candidates)} models: their names begin with {', '.join(map(repr, prefixes))}",
            rule="one model is imported",
            fix=f"choose one, for example --prefix {prefixes[0]!r}",
            path=place,
            prefixes=prefixes,
        )
    naming, prefix = candidates[0]
    found = NamedModel(naming, prefix, {n.removeprefix(prefix): clean[n] for n in clean if n.startswith(prefix)})
    if problems := list(_problems(arch, found, shapes)):
        raise _no_model(place, problems)
    return found


def _problems(arch: Arch, model: NamedModel, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    naming, ours = model.naming, tensor_shapes(arch)
    wanted = {
        theirs: (ours[name][0] // len(names), *ours[name][1:])
        for name, names in naming.names.items()
        for theirs in names
    }
    wanted |= {copy: wanted[original] for copy, original in naming.copies.items() if copy in model.names}
    for theirs, shape in wanted.items():
        if theirs not in model.names:
            yield f"{model.prefix}{theirs} is missing"
        elif shapes[model.names[theirs]] != shape:
            found = list(shapes[model.names[theirs]])
            yield f"{model.names[theirs]} has the shape {found}, and {list(shape)} in the model"
    for theirs, name in model.names.items():
        other = not model.prefix and theirs.partition(".")[0] in _OTHER_STATE
        if theirs not in wanted and not theirs.endswith(_COMPUTED) and not other:
            yield f"{name} is not a tensor of the model under {naming.system}'s names"


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _no_model(place: str, problems: list[str]) -> CheckpointError:
    more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return CheckpointError(
        "E-DCP-MODEL",
        f"{place}: " + "\n".join(problems[:_SHOWN]) + more,
        rule="a folder is imported if it holds exactly the tensors of the model, under the names of a Hugging Face "
        "class or of torchtitan's Llama",
        fix="name the model that was trained with --model; rename other tensors before they are saved",
        path=place,
        problems=problems,
    )
