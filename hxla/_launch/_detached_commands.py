"""`hxla run --ray` with `--detach`, `--attach` and `--stop`: runs that outlive the command."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .._core._errors import LaunchError
from ._detached_run import DetachedActor, Followed
from ._elastic_wishes import ElasticWishes
from ._ray_cluster import connect
from ._ray_host import START_SECONDS
from ._user_signals import handing_on_signals
from ._workers import Streams

_POLL_SECONDS = 0.2
_FREE_SECONDS = 10.0
_HEAD = "node:__internal_head__"  # of a resource that Ray gives the head


def detach(
    address: str,
    name: str,
    wishes: ElasticWishes,
    streams: Streams,
    is_unread: Callable[[], bool],
) -> int:
    """Start a run that outlives this command, and follow it.

    Args:
        address: Of the cluster, as `ray.init` takes it.
        name: Of the run.
        wishes: What is asked of it.
        streams: Where what it prints goes.
        is_unread: Whether nobody reads those any more.

    Returns:
        Its exit code, or of the signal by which following it ended.

    Raises:
        LaunchError: If there is no such cluster, or a run of this name.
    """
    connect(address)
    _free(name)
    heads = [n["NodeID"] for n in ray.nodes() if n["Alive"] and _HEAD in n["Resources"]]
    where = NodeAffinitySchedulingStrategy(heads[0], soft=False) if heads else "DEFAULT"
    try:
        actor = DetachedActor.options(
            name=name,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=where,
        ).remote(wishes, os.getcwd())
    except ValueError:  # another command was faster
        raise _in_use(name) from None
    return _follow(address, name, actor, streams, is_unread)


def attach(address: str, name: str, streams: Streams, is_unread: Callable[[], bool]) -> int:
    """Follow a run that `detach` started, from where its kept output begins.

    Args:
        address: Of the cluster, as `ray.init` takes it.
        name: Of the run.
        streams: Where what it prints goes.
        is_unread: Whether nobody reads those any more.

    Returns:
        Its exit code, or of the signal by which following it ended.

    Raises:
        LaunchError: If there is no such cluster, or no such run.
    """
    connect(address)
    return _follow(address, name, _actor("--attach", name), streams, is_unread)


def stop(address: str, name: str, streams: Streams) -> int:
    """Ask a run that `detach` started to end as SIGTERM does, and wait for nothing.

    Args:
        address: Of the cluster, as `ray.init` takes it.
        name: Of the run.
        streams: Where it is said.

    Returns:
        The exit code of this command.

    Raises:
        LaunchError: If there is no such cluster, or no such run.
    """
    connect(address)
    code = _asked(name, _actor("--stop", name).stop.remote())
    end = "is asked to end" if code is None else f"had ended with exit code {code}"
    words = f"hxla: run {name} {end}: hxla run --ray {address} --attach {name} shows its output\n"
    streams.err.write(words.encode())
    return 0


def _follow(
    address: str, name: str, actor: Any, streams: Streams, is_unread: Callable[[], bool]
) -> int:
    since, again = 0, f"hxla run --ray {address} --attach {name}"
    left = threading.Event()
    answer: Any = None
    # A KeyboardInterrupt may be raised where Ray calls Python and lets no exception out.
    with handing_on_signals(lambda _: left.set(), [signal.SIGINT]):
        while not is_unread() and not left.is_set():
            if answer is None:
                answer, asked_at = actor.follow.remote(since), time.monotonic()
            ready, _ = ray.wait([answer], timeout=_POLL_SECONDS)
            if not ready and time.monotonic() < asked_at + START_SECONDS:
                continue
            heard: Followed = _asked(name, answer, timeout=0)
            answer = None
            if heard.output.first > since:
                streams.err.write(b"hxla: what the run printed before is no longer kept\n")
            for is_error, text in heard.output.pieces:
                (streams.err if is_error else streams.out).write(text)
            since = heard.output.end
            if heard.output.pieces:
                continue
            if heard.code is not None:
                return heard.code
            left.wait(_POLL_SECONDS)
    if not left.is_set():
        return 128 + signal.SIGPIPE
    words = f"hxla: run {name} goes on: {again} follows it, with --stop it ends\n"
    streams.err.write(words.encode())
    return 128 + signal.SIGINT


def _actor(option: str, name: str) -> Any:
    try:
        return ray.get_actor(name)
    except ValueError:
        names = sorted(ray.util.list_named_actors())
        there = f"there are {', '.join(names)}" if names else "there is none"
        raise LaunchError(f"{option} {name}: no such run on the Ray cluster; {there}") from None


def _free(name: str) -> None:
    """Let go of a run of this name of which all was read.

    Raises:
        LaunchError: If there is another.
    """
    try:
        actor = ray.get_actor(name)
    except ValueError:
        return
    with contextlib.suppress(ray.exceptions.RayActorError):  # it has just gone by itself
        standing: Any = ray.get(actor.standing.remote(), timeout=START_SECONDS)
        if not standing[1]:
            raise _in_use(name, standing[0])
        ray.kill(actor)
    until = time.monotonic() + _FREE_SECONDS
    with contextlib.suppress(ValueError):
        while time.monotonic() < until:
            ray.get_actor(name)
            time.sleep(_POLL_SECONDS)


def _in_use(name: str, code: int | None = None) -> LaunchError:
    is_there = "is there already" if code is None else f"has ended with exit code {code}, unread"
    return LaunchError(
        f"--detach {name}: a run of this name {is_there}. Use another name, --attach {name} to "
        f"follow it, or --stop {name} to end it"
    )


def _asked(name: str, answer: Any, timeout: float = START_SECONDS) -> Any:
    """What a run's actor answers.

    Raises:
        LaunchError: If it is gone.
    """
    try:
        return ray.get(answer, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise LaunchError(f"run {name} has not answered for {START_SECONDS:g} s") from None
    except ray.exceptions.RayActorError:
        raise LaunchError(
            f"run {name} is gone, and its processes with it: the actor that decided for it has "
            "ended. A new run goes on from the newest checkpoint"
        ) from None
