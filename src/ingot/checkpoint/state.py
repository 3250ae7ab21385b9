"""Everything a model and its optimizer hold, as one flat dict of tensors, and back.

    model.<fqn>              parameters and persistent buffers
    optim.exp_avg.<fqn>      AdamW's moments and step, by parameter name
    optim.exp_avg_sq.<fqn>
    optim.step.<fqn>

Names are fully qualified parameter names as `torch.distributed.checkpoint.state_dict` gives them: wrappers (FSDP,
compile) do not show. Learning rates are not state: they are a function of the step.
"""

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from ingot.errors import CheckpointError

MODEL, OPTIM = "model.", "optim."


def training_state(model: Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """References, not copies: DTensors where parameters are sharded. An optimizer that never stepped gets its state
    here (zero moments), so that it can be loaded into."""
    state: dict[str, Tensor] = {MODEL + name: _tensor(name, t) for name, t in get_model_state_dict(model).items()}
    for name, kinds in _optimizer_state(model, optimizer)["state"].items():
        for kind, value in kinds.items():
            state[f"{OPTIM}{kind}.{name}"] = _tensor(f"{kind} of {name}", value)
    return state


def put_training_state(model: Module, optimizer: Optimizer, state: dict[str, Tensor]) -> None:
    """Make `state` (as from `training_state`) the state of `model` and `optimizer`."""
    set_model_state_dict(model, {k.removeprefix(MODEL): v for k, v in state.items() if k.startswith(MODEL)})
    whole = _optimizer_state(model, optimizer)
    moments = {name: {kind: state[f"{OPTIM}{kind}.{name}"] for kind in kinds} for name, kinds in whole["state"].items()}
    restored: Any = {**whole, "state": moments}
    set_optimizer_state_dict(model, optimizer, restored)


def _optimizer_state(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer)


def _tensor(name: str, value) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{name} is a {type(value).__name__}", rule="checkpoints hold tensors; nothing in them is unpickled"
        )
    return value
