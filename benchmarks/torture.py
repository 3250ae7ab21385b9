"""Random faults at random moments, on a run whose code this script does not know.

    python benchmarks/torture.py [--faults 200] [--seed 1] [--trial N] [--steps 300] [--folder DIR] [--write]

It imports nothing of ingot: a tiny run of two ranks is started by its command, its processes are found in /proc, and
everything is broken from outside, several faults in a row, without waiting for a recovery. Then the same command is
given until it ends well. The judgment comes from raw files alone: the tensor files of the last checkpoint are byte for
byte those of an undisturbed run; so are the loss, the gradient norm and the learning rate of every step in the event
log, and the samples of every step in the ledger, each once; every exit code is one that the documents give for the
fault; and no process, lock, socket, shared memory or temporary file is left.

One line is printed per fault. `--trial N` plays one trial again: seed and number give its kinds, settings and pauses,
but a machine has its own moments. As root, the run folder is a small tmpfs, so that it can be filled; without the right
to mount one, the faults of a full disk are left out. Ctrl-C removes everything that was started. Exit code 1: red.
"""

import argparse
import ctypes
import datetime
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

RESULTS = Path(__file__).parent / "results"
BATCH, SEQ_LEN, VOCAB, EOT = 8, 32, 64, 0
TOKENS, DOCUMENT, BLOCK_BYTES = 100_000, 100, 4096
MOST_STEPS = TOKENS // SEQ_LEN // BATCH - 1  # so that no sample is trained twice
_STEPS = "STEPS"
RUN_FILE = f"""name = "torture"
seed = 7

[model]
vocab_size = {VOCAB}
d_model = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
d_ffn = 64
max_seq_len = {SEQ_LEN}

[data]
tokens = "tokens"

[train]
steps = {_STEPS}
seq_len = {SEQ_LEN}
global_batch = {BATCH}
micro_batch = 2
precision = "fp32"
device = "cpu"

[parallel]
dp_shard = 2

[checkpoint]
every_steps = 10
keep = 6

[watch]
log_every = 1

[launch]
watchdog_seconds = 3
max_restarts = 10000
"""
# Settings of which no loss and no weight depends, so that one undisturbed run is the twin of all trials.
DRAWN = {
    "checkpoint.mode": ('"async"', '"sync"'),
    "checkpoint.replicas": ("0", "1"),
    "checkpoint.every_steps": ("5", "10", "20"),
    "launch.restart": ('"full"', '"partial"'),
}
DISK_BYTES = 64 << 20
DEADLINE_SECONDS = 240.0  # from the last fault to the end of the run, or five times the twin
LEAVE_SECONDS = 5.0  # for processes of a command that has ended
POLL_SECONDS = 0.01
OK, STOPPED, BUSY, NO_ROOM, GIVEN_UP, INTERRUPTED = 0, 10, 30, 3, 93, 130  # exit codes of docs/resume.md
SAME = 3  # failures without a new step between them, after which a run may be given up
ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # prctl: PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER


# -- the files of a run --


def write_project(folder: Path, steps: int) -> None:
    """Write a token folder with a random walk over the vocabulary (docs/api.md), and a run file for it."""
    tokens, random, place = folder / "tokens", Random(3), 0
    tokens.mkdir(parents=True)
    ids = array("H")
    for number in range(TOKENS):
        place = (place + random.randint(-2, 2)) % (VOCAB - 1)
        ids.append(EOT if number % DOCUMENT == DOCUMENT - 1 else 1 + place)
    if sys.byteorder == "big":
        ids.byteswap()
    data = ids.tobytes()
    hashes = (hashlib.sha256(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES))
    blocks = b"".join(hashes)
    documents = b"".join(struct.pack("<QI16x", at, DOCUMENT) for at in range(0, TOKENS, DOCUMENT))
    for suffix, content in (("tokens", data), ("blocks", blocks), ("documents", documents)):
        (tokens / f"walk.{suffix}").write_bytes(content)
    shard = {
        "name": "walk",
        "source": "walk",
        "tokens": TOKENS,
        "documents": TOKENS // DOCUMENT,
        "text_bytes": TOKENS,
        "blocks_sha256": hashlib.sha256(blocks).hexdigest(),
        "documents_sha256": hashlib.sha256(documents).hexdigest(),
    }
    manifest = {
        "version": 1,
        "dtype": "uint16",
        "vocab_size": VOCAB,
        "eot_id": EOT,
        "tokenizer_sha256": "0" * 64,
        "corpus_sha256": "0" * 64,
        "split": "train",
        "block_bytes": BLOCK_BYTES,
        "seed": 0,
        "shards": [shard],
    }
    (tokens / "manifest.json").write_text(json.dumps(manifest))
    (folder / "run.toml").write_text(RUN_FILE.replace(_STEPS, str(steps)))


def events(run: Path) -> list[dict]:
    """Return the events of a run, without torn lines."""
    found = []
    with suppress(FileNotFoundError):
        for line in (run / "events.jsonl").read_bytes().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return [event for event in found if isinstance(event, dict)]


def checkpoints(run: Path) -> list[Path]:
    """Return the finished checkpoints of a run, the newest first."""
    return sorted((path.parent for path in (run / "checkpoints").glob("step-*/manifest.json")), reverse=True)


# -- the judgment --


def numbers(run: Path) -> dict[int, list[bytes]]:
    """Return step -> the bits of (loss, gradient norm, learning rate), once per time that it was trained. Times that
    the run rolled back are void, and left out."""
    found: dict[int, list[bytes]] = {}
    for event in events(run):
        if event.get("kind") == "rolled_back":
            for step in range(event["to_step"] + 1, event["from_step"] + 1):
                found.pop(step, None)
        elif event.get("kind") == "step":
            bits = struct.pack("<3d", event["loss"], event["grad_norm"], event["lr"])
            found.setdefault(event["step"], []).append(bits)
    return found


def samples(run: Path, checkpoint: Path) -> list[tuple[int, tuple[int, ...]]]:
    """Return (step, sample ids) for all steps that a checkpoint lists. Raises ValueError for damage."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for segment in json.loads((checkpoint / "manifest.json").read_bytes())["ledger"]:
        data = (run / "ledger" / segment["file"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != segment["sha256"]:
            raise ValueError(f"{segment['file']} of the ledger does not have its hash")
        ids = struct.unpack(f"<{len(data) // 8}q", data)
        for row, step in enumerate(range(segment["first_step"], segment["last_step"] + 1)):
            found.append((step, ids[row * BATCH : (row + 1) * BATCH]))
    return found


def tensors(file: Path) -> dict[str, tuple[str, bytes]]:
    """Return the tensors of a safetensors file: key -> (dtype and shape, bytes)."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    return {
        key: (f"{entry['dtype']} {entry['shape']}", data[begin:][slice(*entry["data_offsets"])])
        for key, entry in header.items()
    }


def wrong_numbers(run: Path, twin: Path) -> Iterator[str]:
    """Yield the first step whose numbers in the log are not those of the twin, at any time that it was trained."""
    ours, theirs = numbers(run), numbers(twin)
    for step in sorted(theirs):
        if step not in ours:
            yield f"step {step} is not in the log"
            return
        for bits in ours[step]:
            if bits not in theirs[step]:
                yield f"step {step}: loss, norm, rate {struct.unpack('<3d', bits)} are not those of the twin"
                return
    if more := sorted(ours.keys() - theirs.keys()):
        yield f"steps {more} are in the log, but not in that of the twin"


def wrong_tensors(mine: Path, other: Path) -> Iterator[str]:
    """Yield the difference of each tensor file of two checkpoints, and each file that is not as listed."""
    files = json.loads((mine / "manifest.json").read_bytes())["files"]
    names = {path.name for path in mine.glob("*.safetensors")}
    if names != {path.name for path in other.glob("*.safetensors")} or names != files.keys():
        yield f"{mine.name} has the files {sorted(names)}, and lists {sorted(files)}"
        return
    for name in sorted(names):
        data = (mine / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != files[name]["sha256"]:
            yield f"{name} of {mine.name} does not have its hash"
        if data != (other / name).read_bytes():
            ours, theirs = tensors(mine / name), tensors(other / name)
            keys = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
            yield f"{name} of {mine.name} has other bytes: {', '.join(keys[:3]) or 'of its header'}"


def wrong_samples(ours: list[tuple[int, tuple[int, ...]]], theirs: list[tuple[int, tuple[int, ...]]]) -> Iterator[str]:
    """Yield what is wrong with the samples of a run: steps, samples trained twice, or others than the twin's."""
    if [step for step, _ in ours] != list(range(1, len(theirs) + 1)):
        yield f"the ledger has not each of the steps 1 to {len(theirs)} once, in order"
    seen: dict[int, int] = {}
    for step, ids in ours:
        for one in ids:
            if one in seen:
                yield f"sample {one} is trained in step {seen[one]} and in step {step}"
                return
            seen[one] = step
    if ours != theirs:
        different = [mine[0] for mine, other in zip(ours, theirs, strict=False) if mine != other]
        yield f"step {different[0]} has other samples" if different else "the ledgers have other steps"


def judge(run: Path, twin: Path) -> list[str]:
    """Return what the files of a run that has ended have, and those of its undisturbed twin have not."""
    try:
        mine, other = checkpoints(run)[0], checkpoints(twin)[0]
        if mine.name != other.name:
            return [f"the last checkpoint is {mine.name}, not {other.name}"]
        return [
            *wrong_numbers(run, twin),
            *wrong_tensors(mine, other),
            *wrong_samples(samples(run, mine), samples(twin, other)),
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        return [f"the files of the run cannot be read: {type(error).__name__}: {error}"]


def leftovers(run: Path, temporary: Path) -> list[str]:
    """Return the temporary files, sockets and held locks that a run which has ended left in its folder."""
    found = [f"the temporary file {path.name}" for path in temporary.rglob("*") if not path.is_dir()]
    for path in run.rglob("*"):
        half = path.name.startswith((".saving-", ".removed-")) or path.suffix == ".tmp"
        if half or stat.S_ISSOCK(path.lstat().st_mode):
            found.append(str(path.relative_to(run)))
    found += [name for name in ("stop-request", "leader.json") if (run / name).exists()]
    for lock in run.glob("*lock"):
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(f"{lock.name} is held")
    return [f"{one} is left" for one in found]


def shared_memory() -> set[str]:
    """Return the files in /dev/shm that no program has open or mapped."""
    found = {str(path) for path in Path("/dev/shm").glob("*") if path.is_file()}
    for process in Path("/proc").glob("[0-9]*") if found else ():
        with suppress(OSError):
            maps = (process / "maps").read_text()
            found -= {path for path in found if path in maps}
            found -= {str(link.readlink()) for link in (process / "fd").iterdir()}
    return found


# -- processes --


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it. started: in clock ticks since boot, by which two with one number differ."""

    pid: int
    parent: int
    started: int
    command: str

    def send(self, number: signal.Signals) -> bool:
        """Send a signal. Returns whether the process is still there."""
        with suppress(ProcessLookupError):
            if (now := _read(self.pid)) and now.started == self.started:
                os.kill(self.pid, number)
                return True
        return False


def _read(pid: int) -> Process | None:
    """Return a process, or None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else Process(pid, int(fields[1]), int(fields[19]), command)


def descendants() -> list[Process]:
    """Return all living processes that this one has started, at any depth. It adopts those whose parent has ended."""
    everything = [one for path in Path("/proc").glob("[0-9]*") if (one := _read(int(path.name)))]
    found, parents = [], {os.getpid()}
    while more := [one for one in everything if one.parent in parents]:
        found += more
        parents = {one.pid for one in more}
    return found


def reap(but: set[int]) -> None:
    """Take the exit codes of adopted processes, so that they are gone. but: processes that others wait for."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            if fields[0] == "Z" and int(fields[1]) == os.getpid() and int(path.name) not in but:
                os.waitpid(int(path.name), os.WNOHANG)


def _before_start() -> None:
    """Let a command end with this script, and take Ctrl-C as in a terminal. Runs in the new process."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def server_like(one: Process) -> bool:
    """Return whether a process is the server from which ranks are forked, or one of them: they have its command."""
    return "fork_server" in one.command


# -- one trial --


class Red(Exception):
    """A finding after which a trial cannot go on."""


@dataclass
class Trial:
    """A run that is broken again and again, and what is known of it from outside.

    root: its folder. project: that of the run file. own: the drawn settings. twin_seconds: of the undisturbed run;
    pauses are longer where it took longer. disk: whether its run folder is a small disk of its own. later: what is due
    at a time. allowed: the exit codes with which the command that runs may end.
    damaged: (name, inode) of the checkpoints that were damaged. stuck: the step reached at each fault of this command.
    """

    root: Path
    project: Path
    random: Random
    label: str
    own: dict[str, str] = field(default_factory=dict)
    twin_seconds: float = 0.0
    disk: bool = False
    later: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    allowed: set[int] = field(default_factory=set)
    damaged: set[tuple[str, int]] = field(default_factory=set)
    stuck: list[int] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)
    launcher: subprocess.Popen | None = None
    began: float = field(default_factory=time.monotonic)
    is_full: bool = False

    @property
    def run(self) -> Path:
        return self.root / "disk" / "run"

    @property
    def ballast(self) -> Path:
        return self.root / "disk" / "ballast"

    @property
    def temporary(self) -> Path:
        return self.root / "temporary"

    @property
    def step(self) -> int:
        """The highest step in the log."""
        return max((event["step"] for event in events(self.run) if event.get("kind") == "step"), default=0)

    def prepare(self) -> None:
        """Make the folders, and the small disk if it can be."""
        self.temporary.mkdir(parents=True)
        (self.root / "disk").mkdir()
        if os.geteuid() == 0:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "torture", str(self.root / "disk")]
            with suppress(FileNotFoundError):
                self.disk = subprocess.run(mount, capture_output=True).returncode == 0

    def end(self) -> None:
        """Kill all processes."""
        for _ in range(200):
            if not (alive := descendants()):
                break
            for one in alive:
                one.send(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
            reap(but={self.launcher.pid} if self.launcher else set())
            if self.launcher:
                self.launcher.poll()

    def remove(self, keep: Path | None = None) -> None:
        """End all processes, and remove the folders. keep: the place for a copy of the run and its output."""
        self.end()
        if keep:
            shutil.rmtree(keep, ignore_errors=True)
            if self.run.exists():
                shutil.copytree(self.run, keep / "run", symlinks=True)
            keep.mkdir(exist_ok=True)
            shutil.copy(self.root / "output", keep / "output")
        if self.disk:
            subprocess.run(["umount", "-l", str(self.root / "disk")], check=True)
        shutil.rmtree(self.root, ignore_errors=True)

    # the command

    def spawn(self) -> subprocess.Popen:
        """Start the command, always the same."""
        beside = Path(sys.executable).with_name("ingot")
        program = str(beside) if beside.exists() else shutil.which("ingot") or "ingot"
        settings = [word for key, value in self.own.items() for word in ("--set", f"{key}={value}")]
        with (self.root / "output").open("ab") as output:
            return subprocess.Popen(
                [program, "train", str(self.project / "run.toml"), "--out", str(self.run), *settings],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_before_start,
                env=os.environ | {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
            )

    def start(self) -> None:
        self.launcher, self.allowed, self.stuck = self.spawn(), {OK}, []
        if self.is_full:
            self.allowed.add(NO_ROOM)

    def turn(self) -> bool:
        """Do what is due, and give the command again if it has ended. Returns whether it has ended well."""
        for one in [one for one in self.later if one[0] <= time.monotonic()]:
            self.later.remove(one)
            one[1]()
        assert self.launcher is not None
        code = self.launcher.poll()
        reap(but={self.launcher.pid})
        if code is None:
            time.sleep(POLL_SECONDS)
            return False
        self.codes[code] += 1
        # A job that fails again and again before a new step may be given up; the command is then given again.
        if self.stuck and sum(step >= self.stuck[-1] - 1 for step in self.stuck) >= SAME:
            self.allowed.add(GIVEN_UP)
        if code not in self.allowed:
            raise Red(f"exit code {code}, not one of {sorted(self.allowed)}")
        if code == OK:
            return True
        self.say(f"the command ended with {code}, and is given again")
        self.start()
        return False

    def wait(self) -> bool:
        """Wait for the random moment of a fault. Returns whether the run ended before it."""
        kind = self.random.choice(("at once", "seconds", "steps"))
        most = {"at once": 0.1, "seconds": self.twin_seconds / 4, "steps": max(20.0, self.twin_seconds)}[kind]
        pause = most if kind == "steps" else most * self.random.random()
        steps = self.step + self.random.randint(1, 40) if kind == "steps" else sys.maxsize
        end = time.monotonic() + pause
        while time.monotonic() < end and self.step < steps:
            if self.turn():
                return True
        return self.turn()

    def finish(self) -> None:
        """Give the command until the run has ended well, also with a sound last checkpoint. Raises Red if it takes too
        long."""
        patience = max(DEADLINE_SECONDS, 5 * self.twin_seconds)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not self.turn():
                continue
            last = checkpoints(self.run)[:1]
            if self.later or any((path.name, path.stat().st_ino) in self.damaged for path in last):
                self.start()  # a run that has ended is tried again, and its last checkpoint is made again
                continue
            return
        raise Red(f"no end after {patience:.0f} s, at step {self.step}")

    def say(self, text: str) -> None:
        print(f"{self.label}  {time.monotonic() - self.began:6.2f} s  step {self.step:3}  {text}", flush=True)

    # what faults need

    def of(self, role: str) -> list[Process]:
        """Return the processes with a role, as `ps` shows them. Ranks are forked from a server that the launcher has
        started; all others name their module."""
        alive, top = descendants(), self.launcher.pid if self.launcher else 0
        servers = [one for one in alive if one.parent == top and server_like(one)]
        roles = {
            "launcher": [one for one in alive if one.pid == top],
            "server": servers,
            "rank": [one for one in alive if one.parent in {server.pid for server in servers} and server_like(one)],
            "writer": [one for one in alive if "checkpoint.writer" in one.command],
            "keeper": [one for one in alive if "checkpoint.keeper" in one.command],
            "process": alive,
        }
        return roles[role]

    def may_end(self, *codes: int) -> None:
        self.allowed.update(codes)

    def has_begun(self) -> bool:
        """Return whether the command that runs has the lock of the run, and so has its handlers of signals."""
        with suppress(OSError, ValueError, KeyError):
            assert self.launcher is not None
            return json.loads((self.run / "lock").read_bytes())["pid"] == self.launcher.pid
        return False

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        self.later.append((time.monotonic() + seconds, do))

    def sound(self) -> Path | None:
        """Return the newest checkpoint, if one of the two before it is undamaged."""
        names = checkpoints(self.run)[:3]
        with suppress(FileNotFoundError):
            older = [path for path in names[1:] if (path.name, path.stat().st_ino) not in self.damaged]
            return names[0] if older else None
        return None


# -- the faults: each returns what it did, or "" if it cannot be now --


def _ends_of_launcher(number: signal.Signals, *, begun: bool) -> set[int]:
    """Return the exit codes after a signal. begun: it was sent after the command took the lock; before, Python's own
    handlers are in place, and the command may have begun when the signal arrives."""
    if number == signal.SIGKILL:
        return {-number}
    if begun:
        return {STOPPED}
    return {STOPPED, -number, *([INTERRUPTED] if number == signal.SIGINT else [])}


def signaled(role: str, number: signal.Signals, *, every: bool = False) -> Callable[[Trial], str]:
    """Return the fault of a signal to one process with a role, or to every one."""

    def fault(trial: Trial) -> str:
        if not (found := trial.of(role)):
            return ""
        chosen = found if every else [trial.random.choice(found)]
        top = trial.launcher.pid if trial.launcher else 0
        if any(one.pid == top for one in chosen):
            trial.may_end(*_ends_of_launcher(number, begun=trial.has_begun()))
        done = [one.pid for one in chosen if one.send(number)]
        return f"{number.name} of {role} {', '.join(map(str, done))}" if done else ""

    return fault


def paused(role: str, *, every: bool = False) -> Callable[[Trial], str]:
    """Return the fault of SIGSTOP to a process with a role, or to every one, and of SIGCONT at a later moment."""

    def fault(trial: Trial) -> str:
        if not (found := trial.of(role)):
            return ""
        chosen, seconds = found if every else [trial.random.choice(found)], trial.random.uniform(0.05, 5)
        done = [one for one in chosen if one.send(signal.SIGSTOP)]
        trial.after(seconds, lambda: [one.send(signal.SIGCONT) for one in done])
        return f"SIGSTOP of {role} {', '.join(str(one.pid) for one in done)} for {seconds:.2f} s" if done else ""

    return fault


def asked(trial: Trial) -> str:
    """Ask the launcher to stop."""
    return signaled("launcher", trial.random.choice(ASKS))(trial)


def asked_twice(trial: Trial) -> str:
    """Ask the launcher to stop with two signals."""
    first, second = (signaled("launcher", trial.random.choice(ASKS)) for _ in range(2))
    trial.may_end(INTERRUPTED)
    before = first(trial)
    time.sleep(trial.random.uniform(0, 0.3))
    return f"{before}, then {second(trial) or 'nothing: it has ended'}" if before else ""


def asked_all(trial: Trial) -> str:
    """Ask every process of the job to stop, as a scheduler does."""
    return signaled("process", trial.random.choice((signal.SIGTERM, signal.SIGUSR1)), every=True)(trial)


def interrupted_save(trial: Trial) -> str:
    """Wait for the folder of a save that is under way, and kill a writer, a rank or everything."""
    end, seen = time.monotonic() + 5, ""
    while not seen and time.monotonic() < end:
        seen = next((path.name for path in (trial.run / "checkpoints").glob(".saving-*")), "")
        time.sleep(0.0005)
    if not seen:
        return ""
    time.sleep(trial.random.uniform(0, 0.02))
    role = trial.random.choice(("writer", "rank", "process"))
    done = signaled(role, signal.SIGKILL, every=role == "process")(trial)
    return f"during the save {seen}: {done}" if done else ""


def damage(change: Callable[[Path, Random], str]) -> Callable[[Trial], str]:
    """Return the fault of damage to the newest checkpoint, while the run trains or after everything was killed."""

    def fault(trial: Trial) -> str:
        if not (newest := trial.sound()):
            return ""
        killed = trial.random.random() < 0.5 and signaled("process", signal.SIGKILL, every=True)(trial)
        with suppress(FileNotFoundError):
            trial.damaged.add((newest.name, newest.stat().st_ino))
            return f"{change(newest, trial.random)} of {newest.name}" + (f", after {killed}" if killed else "")
        return killed or ""

    return fault


def _any_file(folder: Path, random: Random) -> Path:
    return random.choice(sorted(path for path in folder.iterdir() if path.is_file()))


def flip(folder: Path, random: Random) -> str:
    """Flip a bit of a file."""
    file = _any_file(folder, random)
    with file.open("r+b") as opened:
        at, bit = random.randrange(file.stat().st_size), random.randrange(8)
        value = os.pread(opened.fileno(), 1, at)[0]
        os.pwrite(opened.fileno(), bytes([value ^ 1 << bit]), at)
    return f"bit {bit} of byte {at} of {file.name}"


def cut(folder: Path, random: Random) -> str:
    """Cut a file."""
    file = _any_file(folder, random)
    size = random.choice((0, random.randrange(file.stat().st_size)))
    os.truncate(file, size)
    return f"{file.name} cut to {size} bytes"


def lose_file(folder: Path, random: Random) -> str:
    """Remove a file."""
    file = _any_file(folder, random)
    file.unlink()
    return f"{file.name} removed"


def lose_folder(folder: Path, _: Random) -> str:
    """Remove all."""
    shutil.rmtree(folder)
    return "all files"


def torn_log(trial: Trial) -> str:
    """Kill everything, and leave the last line of the log torn: in half if its step will be trained again, otherwise
    followed by a half one."""
    log = trial.run / "events.jsonl"
    if not log.exists() or not (done := signaled("process", signal.SIGKILL, every=True)(trial)):
        return ""
    assert trial.launcher is not None
    trial.launcher.wait()
    data = log.read_bytes()
    last = data.rstrip(b"\n").rsplit(b"\n", 1)[-1]
    try:
        event = json.loads(last)
    except ValueError:
        return f"{done}; the last line was torn already"
    saved = int(newest[0].name.removeprefix("step-")) if (newest := checkpoints(trial.run)) else 0
    if event.get("kind") == "step" and event["step"] > saved:
        os.truncate(log, len(data.rstrip(b"\n")) - trial.random.randint(1, len(last) - 1))
        return f"{done}; the line of step {event['step']} is cut"
    with log.open("ab") as file, suppress(OSError):
        file.write(last[: trial.random.randint(1, len(last) - 1)])
    return f"{done}; a half line follows the last one"


def full_disk(trial: Trial) -> str:
    """Fill the disk of the run folder, and make room at a later moment."""
    if not trial.disk or trial.is_full:
        return ""
    seconds, written = trial.random.uniform(0.1, 4), 0
    with trial.ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    written += file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    trial.is_full = True
    trial.may_end(NO_ROOM)

    def make_room() -> None:
        trial.ballast.unlink()
        trial.is_full = False

    trial.after(seconds, make_room)
    return f"the disk is full for {seconds:.2f} s, by {written / (1 << 20):.1f} MiB"


def second_command(trial: Trial) -> str:
    """Give the same command while it trains. If the first one ends meanwhile, the second one goes on."""
    if not trial.has_begun():
        return ""
    second, allowed = trial.spawn(), {BUSY}
    while (code := second.poll()) is None:
        assert trial.launcher is not None
        if (first := trial.launcher.poll()) is not None:
            trial.codes[first] += 1
            if first not in trial.allowed | {GIVEN_UP}:
                second.kill()
                raise Red(f"exit code {first}, not one of {sorted(trial.allowed)}")
            trial.launcher, trial.allowed = second, trial.allowed | {OK, BUSY}
            return f"the same command again; the first one ended with {first} meanwhile"
        for one in [one for one in trial.later if one[0] <= time.monotonic()]:
            trial.later.remove(one)
            one[1]()
        reap(but={trial.launcher.pid, second.pid})
        time.sleep(POLL_SECONDS)
    if trial.is_full or NO_ROOM in trial.allowed:
        allowed.add(NO_ROOM)
    if trial.launcher and trial.launcher.poll() is not None:
        allowed.add(OK)
    if code not in allowed:
        raise Red(f"the same command, given while it trains, ended with {code}, not with {sorted(allowed)}")
    return f"the same command again, refused with {code}"


KINDS: dict[str, Callable[[Trial], str]] = {
    "kill a rank": signaled("rank", signal.SIGKILL),
    "kill all ranks": signaled("rank", signal.SIGKILL, every=True),
    "kill the launcher": signaled("launcher", signal.SIGKILL),
    "kill the fork server": signaled("server", signal.SIGKILL),
    "kill a writer": signaled("writer", signal.SIGKILL),
    "kill the keeper": signaled("keeper", signal.SIGKILL),
    "kill any process": signaled("process", signal.SIGKILL),
    "kill everything": signaled("process", signal.SIGKILL, every=True),
    "freeze a rank": signaled("rank", signal.SIGSTOP),
    "pause a rank": paused("rank"),
    "pause the launcher": paused("launcher"),
    "pause the fork server": paused("server"),
    "pause a writer": paused("writer"),
    "pause the keeper": paused("keeper"),
    "pause everything": paused("process", every=True),
    "ask the launcher": asked,
    "ask the launcher twice": asked_twice,
    "ask every process": asked_all,
    "SIGTERM of a rank": signaled("rank", signal.SIGTERM),
    "SIGTERM of a writer": signaled("writer", signal.SIGTERM),
    "interrupt a save": interrupted_save,
    "flip a bit": damage(flip),
    "cut a file": damage(cut),
    "lose a file": damage(lose_file),
    "lose the newest checkpoint": damage(lose_folder),
    "tear the log": torn_log,
    "fill the disk": full_disk,
    "give the command twice": second_command,
}


# -- all trials --


def inject(trial: Trial) -> str:
    """Play one fault of a random kind that can be now. Returns the kind, "" if none can be."""
    for kind in trial.random.sample(sorted(KINDS), len(KINDS)):
        step = trial.step
        if what := KINDS[kind](trial):
            trial.stuck.append(step)
            trial.say(f"{kind}: {what}")
            return kind
    return ""


def play(trial: Trial, twin: Path, most: int, counted: Counter[str]) -> list[str]:
    """Break a run `most` times at most, let it end, and judge it. Returns the findings; counts the kinds."""
    memory, planned = shared_memory(), min(most, trial.random.randint(3, 6))
    try:
        trial.start()
        for _ in range(planned):
            if trial.wait():
                break
            if kind := inject(trial):
                counted[kind] += 1
        trial.finish()
    except Red as error:
        return [str(error)]
    end = time.monotonic() + LEAVE_SECONDS
    while (alive := descendants()) and time.monotonic() < end:
        reap(but=set())
        time.sleep(POLL_SECONDS)
    return [
        *judge(trial.run, twin),
        *leftovers(trial.run, trial.temporary),
        *(f"process {one.pid} is left: {one.command}" for one in alive),
        *(f"shared memory {path} is left" for path in shared_memory() - memory),
    ]


def undisturbed(root: Path, project: Path) -> Path:
    """Train the undisturbed run, and return its folder."""
    twin = Trial(root / "twin", project, Random(0), "twin", twin_seconds=3600.0)
    twin.temporary.mkdir(parents=True)
    twin.start()
    try:
        twin.finish()
        if found := judge(twin.run, twin.run):
            raise Red("; ".join(found))
    except Red as error:
        raise SystemExit(f"the undisturbed run failed: {error}\n{(twin.root / 'output').read_text()[-2000:]}") from None
    finally:
        twin.end()
    return twin.run


def machine() -> dict[str, object]:
    """Return the machine, as the other records have it."""
    with suppress(OSError, StopIteration):
        line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        cpu = " ".join(line.split(":", 1)[1].split()[:2])
        return {"cores": os.cpu_count(), "cpu": cpu, "load_average": round(os.getloadavg()[0], 2)}
    return {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Play trials until there were enough faults, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="how many faults (default: 200)")
    parser.add_argument("--steps", type=int, default=300, help=f"of a run, at most {MOST_STEPS} (default: 300)")
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--trial", type=int, default=None, help="play this trial of the seed alone")
    parser.add_argument("--folder", type=Path, default=None, help="for the runs; red ones stay (default: a new one)")
    parser.add_argument("--write", action="store_true", help="write results/torture.json")
    args = parser.parse_args()
    if not 40 <= args.steps <= MOST_STEPS:
        parser.error(f"--steps {args.steps} is not between 40 and {MOST_STEPS}")
    seed = Random().randrange(10**6) if args.seed is None else args.seed
    root = (args.folder or Path(tempfile.mkdtemp(prefix="torture-"))).resolve() / f"seed-{seed}"
    if root.exists():
        parser.error(f"{root} exists: name another folder or seed")
    signal.signal(signal.SIGTERM, _interrupted)
    signal.signal(signal.SIGINT, _interrupted)
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    print(f"seed {seed}, {args.faults} faults, in {root}", flush=True)
    began, kinds, codes, red = time.monotonic(), Counter[str](), Counter[int](), list[dict[str, object]]()
    number, has_disk, code = args.trial or 1, True, 0
    try:
        project = root / "project"
        write_project(project, args.steps)
        twin = undisturbed(root, project)
        seconds = time.monotonic() - began
        print(f"the undisturbed run has {args.steps} steps; it took {seconds:.1f} s", flush=True)
        while kinds.total() < args.faults:
            random = Random(f"{seed} {number}")
            own = {key: random.choice(values) for key, values in DRAWN.items()}
            if own["checkpoint.mode"] == '"sync"':
                own["checkpoint.replicas"] = "0"  # memory keeps what is saved aside
            trial = Trial(root / f"trial-{number}", project, random, f"{seed}.{number}", own, seconds)
            findings = ["interrupted"]
            try:
                trial.prepare()
                if has_disk and not trial.disk:
                    has_disk = False
                    print("no small disk can be mounted here: no fault fills one", flush=True)
                findings = play(trial, twin, args.faults - kinds.total(), kinds)
            finally:
                trial.remove(root / f"red-{number}" if findings and findings != ["interrupted"] else None)
            codes += trial.codes
            if findings:
                red.append({"seed": seed, "trial": number, "settings": own, "findings": findings})
            words = f"RED: {'; '.join(findings)} (kept in {root / f'red-{number}'})" if findings else "green"
            settings = " ".join(f"{key}={value}" for key, value in own.items())
            print(f"{trial.label}  {settings}: {trial.codes.total()} commands, {words}", flush=True)
            number += 1
            if args.trial is not None:
                break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        code = INTERRUPTED
    result = {
        "command": " ".join(["python", "benchmarks/torture.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "results": {
            "seed": seed,
            "steps": args.steps,
            "faults": kinds.total(),
            "trials": number - (args.trial or 1),
            "kinds": dict(sorted(kinds.items())),
            "exit_codes": {str(one): count for one, count in sorted(codes.items())},
            "full_disk": has_disk,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "red": red,
        },
    }
    print(json.dumps(result, indent=1), flush=True)
    if args.write and not code:
        (RESULTS / "torture.json").write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    if not red:
        shutil.rmtree(root, ignore_errors=True)
        if args.folder is None:
            shutil.rmtree(root.parent, ignore_errors=True)
    return code or bool(red)


if __name__ == "__main__":
    sys.exit(main())
