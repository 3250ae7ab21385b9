"""The state of this rank's random generators, as text."""

import torch


def random_state() -> str:
    state = torch.get_rng_state().numpy().tobytes().hex()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state += ":" + torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: str) -> None:
    cpu, _, cuda = state.partition(":")
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(cpu), dtype=torch.uint8))
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(cuda), dtype=torch.uint8))
