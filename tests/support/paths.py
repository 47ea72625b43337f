"""Where things are, whatever folder a test or one of its processes runs in."""

import pathlib

TESTS = pathlib.Path(__file__).parent.parent
ROOT = TESTS.parent
EXAMPLES = ROOT / "examples"
DATA = TESTS / "support" / "data"
JOBS = TESTS / "jobs"
#: With which a process finds `hxla`, `support` and `jobs`.
PYTHONPATH = f"{ROOT}:{TESTS}"
