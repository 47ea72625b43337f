"""What processes tell each other through the coordination service of jax."""

import subprocess
import sys

from support.launched import own_environment

WAITS = """
import socket, threading, time
from support.inside.jax import connect, get, put, serve

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % probe.getsockname()[1]
service = serve(address, 1)
connect(address, 1, 0)
later = threading.Timer(1.0, put, ["word", "there"])
later.start()
print(get("word", 300.0), flush=True)
later.join()
service.shutdown()
"""


def test_a_wait_for_a_word_is_as_many_seconds_as_it_says():
    """A second passes before another thread says it, of three hundred that are waited."""
    command = [sys.executable, "-c", WAITS]
    ran = subprocess.run(
        command, env=own_environment(), capture_output=True, text=True, check=False
    )
    assert ran.stdout.splitlines() == ["there"], ran.stderr
