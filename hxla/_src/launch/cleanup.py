"""A process that cleans up after a launcher that was killed."""

import inspect
import subprocess
import sys
from typing import IO

from . import process_group

_JANITOR = """
import os, shutil, sys, time
if os.fork():  # an actor of Ray that ends kills its children
    os._exit(0)

def remove(path, how, seconds):  # a file may come while others go
    until = time.monotonic() + seconds
    while os.path.exists(path) and time.monotonic() < until:
        with contextlib.suppress(OSError):
            how(path)
        time.sleep(0.02)

lines = sys.stdin.read().split("\\n")
if "done" not in lines:
    for line in lines:
        if line.isdigit():
            end_group(int(line))
    for line in lines:
        if line.startswith("/"):
            remove(line, os.rmdir, 2)
for line in lines:
    if line.startswith("rm "):
        remove(line[3:], shutil.rmtree, 60)
"""


def start_janitor() -> IO[bytes]:
    """A process that outlives the launcher and ends what it left: it reads until the pipe closes.

    The launcher that wrote `done` has ended its processes itself; others were killed. Folders go
    either way.
    """
    script = inspect.getsource(process_group) + _JANITOR
    process = subprocess.Popen(
        [sys.executable, "-c", script], bufsize=0, stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    process.wait()
    return process.stdin
