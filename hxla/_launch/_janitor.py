"""A process that cleans up after a launcher that was killed."""

import inspect
import subprocess
import sys
from typing import IO

from . import _process_group

_JANITOR = """
import os, shutil, sys, time
if os.fork():  # an actor of Ray that ends kills its children
    os._exit(0)
lines = sys.stdin.read().split("\\n")
if "done" in lines:
    sys.exit()
for line in lines:
    if line.isdigit():
        end_group(int(line))
for line in lines:
    if line.startswith("rm "):
        shutil.rmtree(line[3:], ignore_errors=True)
for line in lines:
    for _ in range(100 if line.startswith("/") else 0):
        try:
            os.rmdir(line)
        except FileNotFoundError:
            break
        except OSError:
            time.sleep(0.02)
        else:
            break
"""


def start_janitor() -> IO[bytes]:
    """A process that outlives the launcher and ends what it left: it reads until the pipe closes.

    The launcher has ended everything itself by then, unless it was killed.
    """
    script = inspect.getsource(_process_group) + _JANITOR
    process = subprocess.Popen(
        [sys.executable, "-c", script], bufsize=0, stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    process.wait()
    return process.stdin
