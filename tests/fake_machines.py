"""Machines by given numbers for checks of fleets: programs in place of the process that measures one."""

import json
import sys
from pathlib import Path
from typing import Any

GOOD = {"matmul": 100.0, "memory": 50.0, "disk": 10.0}
# The file has node -> {"rates", "wrong", "link"} of machines that are not sound. The slower end limits a link.
# "ends": requests at which the process ends; "stalls": at which it hangs, once for all processes; "waits": a file for
# which it waits before it measures.
_PROBE = """
import json, os, pathlib, sys, time
from ingot.machine.processes import die_with_parent
die_with_parent()  # like the real one
root, name, opened = pathlib.Path(sys.argv[1]), os.environ["SLURMD_NODENAME"], 0
for line in sys.stdin:
    own = {"rates": json.loads(sys.argv[2]), "wrong": {}, "link": 100.0}
    own |= json.loads((root / "machines.json").read_text()).get(name, {})
    request = json.loads(line)
    if request["do"] in own.get("ends", ()):
        sys.exit(1)
    stalled = root / f"{name}.stalled"
    if request["do"] in own.get("stalls", ()) and not stalled.exists():
        stalled.touch()
        time.sleep(60)
    if request["do"] == "machine":
        (root / f"{name}.asked").touch()
        while "waits" in own and not (root / own["waits"]).exists():
            time.sleep(0.005)
        answer = {"rates": own["rates"], "wrong": own["wrong"]}
    elif request["do"] == "clock":
        answer = {"clock": time.time() + own.get("ahead", 0)}
    elif request["do"] == "open":
        opened += 1
        answer = {"port": f"{name}-{os.getpid()}-{opened}"}
    else:
        place = root / request["port"]
        place.mkdir(exist_ok=True)
        here, other = (place / str(rank) for rank in (request["rank"], 1 - request["rank"]))
        new = place / f"{request['rank']}.new"
        new.write_text(str(own["link"]))
        new.rename(here)
        ends = time.monotonic() + 1.0  # with one that is no more, no sum is completed
        while not other.exists() and time.monotonic() < ends:
            time.sleep(0.005)
        answer = {"link": min(own["link"], float(other.read_text())) if other.exists() else 0.0}
    print(json.dumps(answer), flush=True)
"""


def fake_machines(root: Path, changes: dict[str, Any]) -> list[str]:
    """Return the command that measures a machine, whose name is in SLURMD_NODENAME. root: a folder for the command,
    whose `machines.json` has the changes afterwards, and can have others later. changes: of machines that are not
    sound."""
    root.mkdir(exist_ok=True)
    (root / "machines.json").write_text(json.dumps(changes))
    (root / "probe.py").write_text(_PROBE)
    return [sys.executable, str(root / "probe.py"), str(root), json.dumps(GOOD)]
