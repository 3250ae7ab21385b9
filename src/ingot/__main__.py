"""The program `python -m ingot`, which is the program `ingot`."""

import sys

from ingot.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
