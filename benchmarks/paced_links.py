"""Processes or nodes with a paced link each: network namespaces on one bridge, of Linux, for root.

All of it is in a namespace that ends with its processes. A link carries some bits a second each
way, and holds as few packets as a network card of Linux does (byte queue limits): what a process
says while it sends is not behind all that it has yet to send.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

_PACKET_BYTES = 1514  # with its Ethernet header
_BURST_BYTES = 1700  # that an idle link lets pass at once: the least, a packet
_QUEUE_BYTES = 8_000_000  # that may wait before it, so that nothing is lost
_SETTINGS = {
    "net.ipv4.tcp_limit_output_bytes": f"{2 * _PACKET_BYTES}",
    "net.ipv4.tcp_wmem": "4096 8192 16384",  # else a message is sent before it is on its way
    "net.ipv4.tcp_slow_start_after_idle": "0",
}
_OWN_NETWORK = ("unshare", "--net", "--uts")
_MARK = "PACED_LINKS_ENTERED"  # of a process that is in its own network


def lacking() -> str:
    """What this machine lacks for paced links, in a line; nothing if they can be made."""
    trial = "ip link add switch type bridge && ip link add near type veth peer name far && "
    trial += f"tc qdisc add dev near root tbf rate 1mbit burst {_BURST_BYTES} limit 10000"
    try:
        _run(*_OWN_NETWORK, "sh", "-c", trial)
    except (OSError, subprocess.CalledProcessError) as error:
        why = " ".join((getattr(error, "stderr", "") or str(error)).split())
        return (
            "no paced links here: they are made of network namespaces, which need Linux, root, "
            f"and unshare, ip and tc: {why}"
        )
    return ""


def enter_own_network() -> None:
    """Start this script again in a network of its own.

    Raises:
        SystemExit: If this machine lets nobody make one, with the reason.
    """
    if os.environ.get(_MARK):
        return
    if why := lacking():
        raise SystemExit(why)
    command = [*_OWN_NETWORK, sys.executable, *sys.argv]
    os.execvpe(command[0], command, os.environ | {_MARK: "1"})


def address(rank: int) -> str:
    """Of a process or node, which is its host's name too."""
    return f"10.9.0.{rank + 1}"


@contextlib.contextmanager
def linked(
    command: Sequence[str], num_processes: int, bits_per_second: float, log: pathlib.Path
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that each reach the others over a link of some speed each way.

    Each gets its rank as last argument and starts when its link is there. Needs
    `enter_own_network`.

    Args:
        command: Of every process.
        num_processes: How many.
        bits_per_second: Of a link, in each direction at the same time.
        log: Where their standard errors go.
    """
    with _switch(), log.open("w") as errors, contextlib.ExitStack() as stack:
        own = [[*command, str(rank)] for rank in range(num_processes)]
        processes = [
            stack.enter_context(_behind_a_link(one, rank, bits_per_second, errors))
            for rank, one in enumerate(own)
        ]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        yield processes


def results_of(command: Sequence[str], num_processes: int, bits_per_second: float) -> list[Any]:
    """What `linked` processes print after `RESULT`, as JSON.

    Raises:
        SystemExit: With the end of their standard errors, if one prints none.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        with linked(command, num_processes, bits_per_second, log) as processes:
            said = [process.stdout.read() for process in processes]
        if not all("RESULT " in text for text in said):
            raise SystemExit(log.read_text()[-6000:])
    return [json.loads(text.split("RESULT ", 1)[1]) for text in said]


@contextlib.contextmanager
def nodes(num_nodes: int, bits_per_second: float) -> Iterator[list[int]]:
    """Networks of nodes, each of which reaches the others over a card of some speed each way.

    A process goes to its node by `enter`. Needs `enter_own_network`, whose processes reach each
    other by their loopback, too.

    Args:
        num_nodes: How many.
        bits_per_second: Of a card, in each direction at the same time.

    Yields:
        Of each node a process that is there.
    """
    _run("ip", "link", "set", "lo", "up")
    with _switch(), contextlib.ExitStack() as stack:
        # They never begin, and end when nobody is left who could tell them to.
        held = [_behind_a_link(["true"], n, bits_per_second, None) for n in range(num_nodes)]
        yield [stack.enter_context(one).pid for one in held]


def enter(process: int) -> None:
    """Go to the network and the host's name of a process: this thread, and those that it begins.

    Args:
        process: Its id.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts"):
        with open(f"/proc/{process}/ns/{kind}") as there:
            if libc.setns(there.fileno(), 0):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), there.name)


@contextlib.contextmanager
def _switch() -> Iterator[None]:
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")
    try:
        yield
    finally:
        _run("ip", "link", "delete", "switch")


@contextlib.contextmanager
def _behind_a_link(
    command: Sequence[str], rank: int, bits_per_second: float, errors: IO[str] | None
) -> Iterator[subprocess.Popen[str]]:
    """A process that waits for a line, and is the command afterwards; it ends with this process."""
    waiting = ["sh", "-c", 'echo ready; read line || exit; exec "$@"', "sh", *command]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *_OWN_NETWORK, *waiting],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    try:
        process.stdout.readline()
        _link(rank, process.pid, bits_per_second)
        yield process
    finally:
        process.kill()
        process.wait()


def _link(rank: int, pid: int, bits_per_second: float) -> None:
    """Both ends are paced: what leaves a process by its own end, what comes by the switch's."""
    inside = ["nsenter", f"--target={pid}", "--net", "--uts"]
    near, far = f"near{rank}", f"far{rank}"
    _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(pid))
    pace = f"tbf rate {bits_per_second:.0f}bit burst {_BURST_BYTES} limit {_QUEUE_BYTES}".split()
    for own, device in ((inside, far), ([], near)):
        _run(*own, "ip", "link", "set", device, "gso_max_segs", "1")
        _run(*own, "tc", "qdisc", "add", "dev", device, "root", *pace)
    _run("ip", "link", "set", near, "master", "switch", "up")
    _run(*inside, "ip", "address", "add", f"{address(rank)}/24", "dev", far)
    _run(*inside, "sysctl", "-w", *(f"{name}={value}" for name, value in _SETTINGS.items()))
    for device in ("lo", far):
        _run(*inside, "ip", "link", "set", device, "up")
    _run(*inside, "hostname", address(rank))  # Gloo listens where the name of its host says


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
