"""Starts processes of a warm one, kills that one, and says how they end."""

import os
import pathlib
import signal
import time

from support.inside.launch import WarmProcess
from support.left_behind import wait_until

SCRIPT = """
import os, sys, time
while not os.path.exists("done"):
    time.sleep(0.05)
sys.exit(7)
"""


def parent_of(process):
    return int(pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    pathlib.Path("script.py").write_text(SCRIPT)
    env = dict(os.environ) | {"HXLA_LAUNCHER_PID": str(os.getpid())}
    first, second = (WarmProcess(["script.py"], env, None) for _ in range(2))
    server = parent_of(first)
    assert server not in (os.getpid(), 1)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: parent_of(first) == os.getpid(), "no process was handed over")
    time.sleep(0.2)  # for one that was about to end with the server
    print("alive", first.exit_code, second.exit_code)
    os.kill(second.pid, signal.SIGKILL)
    second.join()
    print("killed", first.exit_code, second.exit_code)
    pathlib.Path("done").touch()
    wait_until(lambda: first.exit_code is not None, "a process did not end")
    third = WarmProcess(["script.py"], env, None)
    third.join()
    print("ended", first.exit_code, third.exit_code)
