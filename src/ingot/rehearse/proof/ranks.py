"""The program of a proof: train each case on forked ranks, and write what they found to a folder.

proof.py starts it with a JSON object on standard input: {"cases": [configuration, ...], "folder": path}. One line of
JSON per case goes to standard output: {"case": number, "error": text or null}.
"""

import gc
import importlib
import json
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch

from ingot.errors import IngotError
from ingot.plugins.load import last_line
from ingot.plugins.loss import VocabularyPart
from ingot.schema.run import RunConfig
from ingot.theory.rules import run_from_dict
from ingot.trainer.build import build_parts
from ingot.trainer.loader.loader import Batch
from ingot.trainer.loss_terms import loss_terms
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.mesh.start import enter_rank, start
from ingot.trainer.step import train_step

STEPS = 3
_SECONDS = 120.0


def batch_of(run: RunConfig, mesh: Mesh, step: int) -> Batch:
    """Return this rank's part of the batch of `step`, of random tokens that do not depend on the layout."""
    train, generator = run.train, torch.Generator().manual_seed(step)
    ids = torch.randint(0, run.model.vocab_size, (train.global_batch, train.seq_len + 1), generator=generator)
    own = ids.chunk(mesh.data_ranks)[mesh.data_rank].unflatten(0, (-1, train.micro_batch))
    return Batch(step, np.zeros(0, np.int64), own[..., :-1], own[..., 1:], None, 0.0)


def train(run: RunConfig, folder: Path, rank: int) -> None:
    """Train STEPS steps as this rank, and write its losses, gradient norms, masters and optimizer state."""
    parts = build_parts(run, torch.device("cpu"), folder)
    facts = [train_step(parts, batch_of(run, parts.mesh, step), run.optim.lr) for step in range(1, STEPS + 1)]
    if parts.mesh.index("pp") == parts.program.table.rank_of_stage[-1]:
        losses = [float(fact.loss) for fact in facts]
    else:
        losses = []
    blocks, moments = {}, parts.optimizer.moments()
    for piece in parts.model.shards:
        state = {kind: tensor for kind, tensor in moments.get(piece.name, {}).items() if tensor.dim()}
        for kind, tensor in {"value": piece.value, **state}.items():
            blocks[f"{kind} of {piece.name}|{','.join(map(str, piece.offsets))}"] = tensor.numpy()
    norms = [float(fact.grad_norm) for fact in facts]
    np.savez(folder / f"rank{rank}.npz", losses=np.array(losses), norms=np.array(norms), **blocks)
    parts.optimizer.close()


def wrong_term(run: RunConfig) -> str:
    """Return what is wrong with a loss term, as text, or "": an error that it raises, or its slope."""
    try:
        return wrong_slope(run)
    except Exception as error:
        return f"a loss term raised {last_line(error)}"


def wrong_slope(run: RunConfig) -> str:
    """Return the name of a loss term whose slope is not the derivative of its values, as text, or ""."""
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets, whole = torch.tensor([0, 3, 6]), VocabularyPart(0, lambda x: x, lambda x: x)
    for term in loss_terms(run):
        slope = term.measure(logits, targets, whole)[1]
        for token, column in ((0, 0), (1, 5), (2, 6)):
            moved = torch.zeros_like(logits)
            moved[token, column] = 1e-5
            more, less = (term.measure(logits + sign * moved, targets, whole)[0][token] for sign in (1, -1))
            right, own = float(more - less) / 2e-5, float(slope[token, column])
            if not abs(right - own) <= 1e-4 * max(abs(right), abs(own), 1e-3):
                return f"the slope of loss term {term.name!r} is {own:.6g} where its values rise by {right:.6g}"
    return ""


def _rank(run: RunConfig, folder: Path, rank: int, listener: socket.socket, pipe: Connection) -> None:
    """Be one rank of a case, and send an error as text, or ""."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a plug-in prints is no answer
    enter_rank(rank, run.parallel.world_size, listener)
    try:
        start("cpu", _SECONDS)
        train(run, folder, rank)
        pipe.send("")
    except IngotError as error:
        pipe.send(f"{error.code}: {error.found}")
    except Exception as error:
        pipe.send(f"rank {rank}: {last_line(error)}")
    # The parent kills all ranks: those that wait for a rank that failed would wait in the destructors of their groups.
    time.sleep(2 * _SECONDS)


def run_case(run: RunConfig, folder: Path) -> str:
    """Train a case on forked ranks, all of which have ended afterwards. Returns the first error, or ""."""
    folder.mkdir(parents=True)
    world, context = run.parallel.world_size, multiprocessing.get_context("fork")
    pipes, processes = [], []
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank, args=(run, folder, rank, listener, theirs), daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
                pipes.append(ours)
        return _first_error(pipes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _first_error(pipes: list[Connection]) -> str:
    """Wait for the answers of all ranks, or the first error. Returns it, or ""."""
    waiting = list(pipes)
    while waiting:
        answered = wait(waiting, _SECONDS)
        if not answered:
            return f"nothing for {_SECONDS:g} s: the ranks wait for each other"
        for pipe in answered:
            assert isinstance(pipe, Connection)
            waiting.remove(pipe)
            try:
                if error := pipe.recv():
                    return error
            except EOFError:
                return "a rank died"
    return ""


def _import_for_ranks() -> None:
    """Import FSDP, the compiler and sympy before forks: each rank of each case would take 1.5 s for them."""
    for module in ("torch.distributed.fsdp", "torch._dynamo"):
        importlib.import_module(module)
    gc.freeze()  # a collection in a rank would visit, and so copy, all that exists now


def main() -> None:
    """Train all cases of the request, one after the other."""
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    for number, settings in enumerate(request["cases"]):
        run = run_from_dict(settings)
        if number == 1:  # the case of one process needs none of it, and may be the last one
            _import_for_ranks()
        error = (number == 0 and wrong_term(run)) or run_case(run, Path(request["folder"]) / str(number))
        print(json.dumps({"case": number, "error": error or None}), flush=True)


if __name__ == "__main__":
    main()
