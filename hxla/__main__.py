"""The command line: `hxla`, or `python -m hxla`."""

import sys

from ._src.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
