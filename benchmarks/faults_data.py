"""A real build under SIGKILL: is the output the same, does it ever hang, how much is done twice?

The command is run once undisturbed. Then it is run again and again, while at random instants the driver, a worker or
the process that forks workers is killed; a killed driver is started again by the same command, as a person would. Each
build that finishes is compared with the undisturbed one: SHA-256 of every file. A build that takes more than
twenty times as long as the undisturbed one, and a minute, counts as hung.

    python benchmarks/faults_data.py --kills 200 -- ingot data build FILES... --out DIR --workers 2
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from record import record

from ingot.storage import sha256_file


@dataclass
class Tally:
    kills: dict[str, int] = field(default_factory=lambda: {"driver": 0, "other": 0})
    builds: int = 0
    hung: int = 0
    different: int = 0
    failed: int = 0
    in_flight: int = 0  # tasks that the kills may have cost: one per worker that was lost
    attempts: set[str] = field(default_factory=set)  # KEY.attempt, of one build after the other
    redone: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description="A real build under SIGKILL.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs="+", help="after --: a command with --out DIR")
    chosen = parser.parse_args()
    command = chosen.command
    if command[0] == "ingot":  # of this environment
        command = [str(Path(sys.executable).with_name("ingot")), *command[1:]]
    out = Path(command[command.index("--out") + 1])
    shutil.rmtree(out, ignore_errors=True)
    started = time.monotonic()
    driver = start(command, out, "undisturbed")
    errors = driver.communicate()[1]
    if driver.returncode:
        sys.exit(f"the undisturbed build failed:\n{errors}")
    seconds = time.monotonic() - started
    expected, tally, pick = digest(place(out, "undisturbed")), Tally(), random.Random(chosen.seed)
    print(f"undisturbed: {seconds:.1f} s", flush=True)
    while sum(tally.kills.values()) < chosen.kills:
        shutil.rmtree(place(out, "disturbed").parent, ignore_errors=True)
        disturb(command, out, seconds, chosen.kills, pick, tally)
        tally.builds += 1
        found = digest(place(out, "disturbed"))
        if found != expected:
            tally.different += 1
            names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            print(f"different: {', '.join(names[:20])}", flush=True)
        tally.redone += len(tally.attempts) - len({name.partition(".")[0] for name in tally.attempts})
        tally.attempts.clear()
        print(tally, flush=True)
    results = {
        "undisturbed_seconds": round(seconds, 1),
        "kills": tally.kills,
        "builds": tally.builds,
        "hung": tally.hung,
        "failed": tally.failed,
        "different_output": tally.different,
        "tasks_in_flight_when_killed": tally.in_flight,
        "tasks_redone": tally.redone,
    }
    sys.argv = [Path(one).name if os.sep in one else one for one in sys.argv]  # the record has names, not paths
    print(record("faults_data", results, ["ingot"]), results)


def place(out: Path, name: str) -> Path:
    return out / name / "corpus"


def start(command: list[str], out: Path, name: str) -> subprocess.Popen:
    place(out, name).parent.mkdir(parents=True, exist_ok=True)
    where = command.index("--out") + 1
    changed = [*command[:where], str(place(out, name)), *command[where + 1 :]]
    return subprocess.Popen(
        changed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def disturb(command: list[str], out: Path, seconds: float, kills: int, pick: random.Random, tally: Tally) -> None:
    """One build to its end, killing until there were `kills` in all."""
    driver, deadline = start(command, out, "disturbed"), time.monotonic() + 20 * seconds + 60
    next_kill = time.monotonic() + pick.uniform(0, seconds / 2)
    while True:
        look_at_attempts(out / "disturbed", tally)
        with contextlib.suppress(subprocess.TimeoutExpired):
            errors = driver.communicate(timeout=0.02)[1]
            if driver.returncode == 0:
                return
            if driver.returncode != -signal.SIGKILL:
                tally.failed += 1
                print(f"failed with {driver.returncode}:\n{errors}", flush=True)
            driver = start(command, out, "disturbed")
        now = time.monotonic()
        if now > deadline:
            tally.hung += 1
            os.killpg(driver.pid, signal.SIGKILL)
            print("hung", flush=True)
            deadline = now + 20 * seconds + 60
        if now >= next_kill and sum(tally.kills.values()) < kills:
            kill_one(driver, pick, tally)
            next_kill = now + pick.uniform(0, seconds / 2)


def kill_one(driver: subprocess.Popen, pick: random.Random, tally: Tally) -> None:
    others = descendants(driver.pid)
    target = driver.pid if not others or pick.random() < 0.3 else pick.choice(others)
    # The death of a process that forked others costs what they had in hand.
    tally.in_flight += max(len(descendants(target)), 1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(target, signal.SIGKILL)
        tally.kills["driver" if target == driver.pid else "other"] += 1


def descendants(pid: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(folder.name)] = int(parent)
    found = [pid]
    for one in found:
        found += sorted(child for child, parent in parents.items() if parent == one)
    return found[1:]


def look_at_attempts(root: Path, tally: Tally) -> None:
    """Folders of attempts that are there now: seen often enough to miss only tasks of milliseconds."""
    for folder in [*root.glob("*/attempts"), *root.glob("*/*/attempts"), *root.glob("*/*/*/attempts")]:
        with contextlib.suppress(OSError):
            tally.attempts |= {path.name for path in folder.iterdir() if not path.name.startswith("removed")}


def digest(folder: Path) -> dict[str, str]:
    """Path -> SHA-256 of every file but those that only say how long something took."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "seconds.json")
    return {str(path.relative_to(folder)): sha256_file(path) for path in files}


if __name__ == "__main__":
    main()
