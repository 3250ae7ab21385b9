import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from tests.expect import refused

from ingot.trainer.mesh.start import (
    SPIN_COUNT,
    choose_device,
    enter_rank,
    rank_threads,
    spin_briefly,
    start,
    stop,
    threads_per_rank,
    use_tf32,
    worker_environment,
)


@pytest.mark.parametrize("ranks, cores, expected", [(1, 2, 2), (2, 2, 1), (4, 2, 1), (2, 16, 8), (3, 16, 5)])
def test_cores_are_shared_out(ranks, cores, expected):
    assert threads_per_rank(ranks, cores) == expected
    assert worker_environment(ranks, cores)["OMP_NUM_THREADS"] == str(expected)


@pytest.mark.parametrize(
    ("own", "count"),
    [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_spin_briefly_unless_the_user_chose_how_they_wait(monkeypatch, own, count):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    job = worker_environment(1, 2) | dict(os.environ)  # as the launcher starts it
    spin_briefly()
    assert job.get("GOMP_SPINCOUNT") == os.environ.get("GOMP_SPINCOUNT") == count


@pytest.mark.parametrize(("text", "threads"), [("2", 2), (" 2 ", 2), ("2,1", 2), ("", 6)])
def test_the_users_number_of_threads_comes_before_the_share_of_cores(monkeypatch, text, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert rank_threads(2, 12) == threads


def test_a_rank_remembers_its_collectives():
    assert int(worker_environment(1)["TORCH_FR_BUFFER_SIZE"]) >= 64


def test_worker_environment_needs_no_torch():
    script = (
        "import sys; from ingot.trainer.mesh.start import worker_environment as w; w(2); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "False"
    assert all(isinstance(v, str) for v in worker_environment(2).values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error_only_if_asked_for():
    assert choose_device("auto", 3).type == "cpu"
    assert choose_device("cpu", 0).type == "cpu"
    with refused("E-GPU-MISSING", gpus=0):
        choose_device("cuda", 0)


def test_tf32_is_one_setting_for_eager_and_compiled_code():
    before = torch.get_float32_matmul_precision()
    try:
        for allowed, precision, name in ((True, "tf32", "high"), (False, "ieee", "highest")):
            use_tf32(allowed)
            assert torch.backends.cuda.matmul.fp32_precision == precision
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
            assert torch.get_float32_matmul_precision() == name
    finally:
        torch.set_float32_matmul_precision(before)


# Process groups and thread counts belong to a process, and some variables are read once by it: cases get their own.
ALONE = """
import torch, torch.distributed as dist
from ingot.trainer.mesh.start import start, stop
place = start("cpu", 5)
t = torch.ones(1); dist.all_reduce(t)
print(place.rank, place.world_size, place.attempt, place.is_first, t.item(), torch.get_num_threads())
stop(); stop()
"""


def run(script, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "TORCHELASTIC_", "INGOT_"))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=inherited | environment
    )
    return done.returncode, done.stdout + done.stderr


def test_without_torchrun_a_process_is_a_job_of_one_and_its_attempts_add_up():
    attempts = 'import os; os.environ.update(INGOT_ATTEMPT="2", TORCHELASTIC_RESTART_COUNT="1")'
    found = run(f"{ALONE}\n{attempts}\n{ALONE}", OMP_NUM_THREADS="1")
    assert found == (0, "0 1 0 True 1.0 1\n0 1 3 True 1.0 1\n")


def test_a_cpu_run_computes_float32_in_full():
    script = "import torch\nprint(torch.get_float32_matmul_precision())"
    for setting in ("True", "False"):
        changed = ALONE.replace('start("cpu", 5)', f'start("cpu", 5, tf32={setting})')
        script += changed + "print(torch.get_float32_matmul_precision())"
    code, out = run(script, OMP_NUM_THREADS="1", TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")
    assert (code, out.splitlines()[::2]) == (0, ["high", "highest", "highest"]), out


def test_several_ranks_need_a_meeting_point(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("E-MASTER-ADDRESS"):
        start("cpu", 5)


def join_again(rank, ranks, listener):
    """Join a job as a rank whose launcher has counted as many restarts as its number. Returns a sum over all ranks."""
    dist.barrier()  # the other rank may still be connecting
    stop()
    enter_rank(rank, ranks, listener, attempt=rank)
    start("cpu", 10)
    found = torch.ones(1)
    dist.all_reduce(found)
    return found.item()


def test_ranks_of_a_node_that_replaced_a_lost_one_join_the_others(fork_ranks):
    """Their launcher has counted no restarts, and that of the other nodes has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert fork_ranks(join_again, 2, listener) == [2.0, 2.0]


@pytest.mark.nightly  # tests/e2e/test_own_loop.py has a restart by torchrun
def test_torchrun_ranks_meet_again_after_a_restart(tmp_path):
    """torchrun restarts in place: the second attempt must not read the first one's addresses (with its defaults)."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "from ingot.trainer.mesh.start import start, stop\n"
        "place = start('cpu', 20)\n"
        "t = torch.ones(1); dist.all_reduce(t)\n"
        "if place.attempt == 0 and place.rank == 1: os._exit(7)\n"
        "dist.barrier()\n"
        "os.write(1, f'joined {place.rank} {place.attempt} {int(t)}\\n'.encode())\n"  # whole lines, not print's pieces
        "stop()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=120, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n"))[-2:] == ["joined 0 1 2", "joined 1 1 2"]
