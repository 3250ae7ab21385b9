"""Copy the files for Prometheus and Grafana: `python -m ingot.observe.prometheus FOLDER`."""

import argparse
import shutil
from pathlib import Path

from ingot.errors import EXIT_OK

FILES = {"rules.yml": "ingot-rules.yml", "dashboard.json": "ingot-dashboard.json"}


def main(arguments: list[str] | None = None) -> int:
    """Copy the files into the folder that `arguments` name, and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m ingot.observe.prometheus", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the rules and the dashboard are written")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in FILES.items():
        print(shutil.copyfile(Path(__file__).with_name(name), folder / own))
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
