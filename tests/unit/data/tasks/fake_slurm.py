"""sbatch, squeue and scancel of a cluster that is this machine: what Slurm(...) runs on a PATH made for a test.

FAKE_SLURM/jobs/1_0         a line "NAME" while the element waits or runs
FAKE_SLURM/kill             numbers of elements whose first process is killed as soon as it has begun a task
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["FAKE_SLURM"])
JOBS = HOME / "jobs"


def sbatch(script: str) -> None:
    text = Path(script).read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))
    first, last = re.fullmatch(r"(\d+)-(\d+)%\d+", options["array"]).groups()
    job = str(len(list(HOME.glob("job-*"))) + 1)
    (HOME / f"job-{job}").touch()
    names = [f"{job}_{index}" for index in range(int(first), int(last) + 1)]
    for name in names:
        (JOBS / name).write_text(options["job-name"])
    command = [sys.executable, __file__, "run", script, options["output"], *names]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    print(job)


def run(script: str, output: str, *names: str) -> None:
    for name in names:
        job, _, index = name.partition("_")
        log = Path(output.replace("%A", job).replace("%a", index))
        with log.open("a") as file:
            env = os.environ | {"SLURM_ARRAY_TASK_ID": index}
            process = subprocess.Popen(["bash", script], stdout=file, stderr=file, env=env)
        doomed = (HOME / "kill").read_text().split() if (HOME / "kill").exists() else []
        if index in doomed:
            (HOME / "kill").write_text(" ".join(one for one in doomed if one != index))
            attempts = Path(script).parent.parent / "attempts"
            while not (attempts.exists() and any(attempts.iterdir())):
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        process.wait()
        (JOBS / name).unlink(missing_ok=True)


def squeue() -> None:
    for path in sorted(JOBS.iterdir()):
        print(path.name, path.read_text(), "None")


def scancel(*names: str) -> None:
    for name in names:
        (JOBS / name).unlink(missing_ok=True)


if __name__ == "__main__":
    if sys.argv[1] == "squeue":
        squeue()
    else:
        {"sbatch": lambda *args: sbatch(args[-1]), "run": run, "scancel": scancel}[sys.argv[1]](*sys.argv[2:])
