"""Programs of replicas, compiled once for each kind of replica, with fixed options.

Every device of a process needs an executable, but XLA makes the same one for devices of one kind.
So the first replica of each kind compiles, and the others load its executables.
"""

import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..core.types import DEVICE_AXIS
from ..jax.portable import lowered_for, portable
from ..plan.parts import SumsForm
from .replica import Replica

_GPUS = frozenset({"cuda", "gpu", "rocm"})
_WAITING = frozenset({"cpu"})


def adds_in_order(platform: str, sums: SumsForm) -> bool:
    """Whether the scatters of programs are written with a fixed order of additions.

    Args:
        platform: `cpu`, `gpu` or another backend's name.
        sums: The form of the sums; only exact ones need determinism.
    """
    return sums.kind == "exact" and platform in _GPUS


def update_waits(platform: str) -> bool:
    """Whether the host reads what a step's sums decide before it calls the update.

    On a CPU this costs nothing, while an update that can be refused needs more memory.
    """
    return platform in _WAITING


def compiler_options(platform: str, sums: SumsForm) -> dict[str, Any]:
    """Options for `jax.jit(..., compiler_options=...)`.

    Args:
        platform: `cpu`, `gpu` or another backend's name.
        sums: The form of the sums; only exact ones need determinism.
    """
    if sums.kind != "exact":
        return {}
    # Otherwise fusion decides which results are rounded to fewer bits; see `Plan.numerics`.
    options = {"xla_allow_excess_precision": False}
    if platform == "cpu":
        # The number of threads may change how a contraction is cut.
        return options | {"xla_cpu_multi_thread_eigen": False}
    if platform in _GPUS:
        # Autotuning may choose other kernels in another process. Without it, matrix products use
        # cuBLAS, which chooses by shape: XLA's Triton kernels would all get the same tile.
        return options | {
            "xla_gpu_exclude_nondeterministic_ops": True,
            "xla_gpu_autotune_level": 0,
            "xla_gpu_enable_triton_gemm": False,
        }
    return options


#: What a CUDA graph may have: XLA's usual kinds of commands, and loops.
_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE"


def loop_options(platform: str, sums: SumsForm) -> dict[str, Any]:
    """Those of `compiler_options`, for a loop whose count is an argument.

    Without a CUDA graph the host would wait for the card before each of its iterations.
    """
    options = compiler_options(platform, sums)
    if platform in ("gpu", "cuda"):
        options["xla_gpu_enable_command_buffer"] = _COMMANDS
    return options


def extra_bytes(compiled: Any) -> int:
    """Bytes of one device that a compiled program needs beside its arguments.

    Args:
        compiled: A `jax.stages.Compiled`; 0 if its backend has no memory analysis.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return 0
    return int(stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes)


def update_options(platform: str, sums: SumsForm) -> dict[str, Any]:
    """Those of `compiler_options`, and a schedule with few live temporaries."""
    options = compiler_options(platform, sums)
    if platform == "cpu":
        # The default, breadth first, would keep the gradients of all tensors until the last.
        options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    return options


_KIND = r"(?:all-|reduce-scatter|collective-)[a-z-]*"
_COLLECTIVE = re.compile(rf" = (\S.*? {_KIND})\(")
_COLLECTIVE_WITHOUT_SHAPE = re.compile(rf" ({_KIND})\(")
#: From the number of a replica to the key of its programs, besides its kind.
Key = Callable[[int], Any]


def firsts_alike(keys: Iterable[Hashable]) -> list[int]:
    """For each key the place of the first equal one."""
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(key, i) for i, key in enumerate(keys)]


def first_of_kind(replicas: Sequence[Replica], more: Key | None = None) -> list[int]:
    """For each replica the first one of its kind, perhaps itself.

    A replica of several processes is the only one of its kind: not every process may have another.
    So is one with unlike stages, for other devices cannot load its programs.

    Args:
        more: A key that must be equal, too.
    """
    keys = []
    for i, replica in enumerate(replicas):
        kinds = tuple((d.platform, d.device_kind) for d in replica.devices)
        key = None if more is None else more(replica.index)
        is_alone = replica.spans_processes or DEVICE_AXIS in dict(replica.axes)
        keys.append((replica.axes, kinds, i if is_alone else None, key))
    return firsts_alike(keys)


def compile_all(
    lowered: Sequence[tuple[str, Any]],
    over: Callable[..., Any] = map,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Any]:
    """Compile programs, and report those that are not ready yet.

    Args:
        lowered: Names of programs, and the programs before compilation.
        over: Like `map`, perhaps on several threads.
    """
    left, lock = [name for name, _ in lowered], threading.Lock()

    def say() -> None:
        done = f"{len(lowered) - len(left)} of {len(lowered)} programs are ready"
        waiting = list(dict.fromkeys(left))
        names = "".join(f" {name}" for name in waiting[:1])
        names += f" and {len(waiting) - 1} more" * (len(waiting) > 1)
        tell(f"compiling{names} ({done})")

    def compiled(task: tuple[str, Any]) -> Any:
        name, program = task
        executable = program.compile()
        with lock:
            left.remove(name)
            say()
        return executable

    say()
    return list(over(compiled, lowered))


def for_others(
    replicas: Sequence[Replica],
    lowered: Mapping[int, Sequence[Any]],
    compiled: Mapping[int, Sequence[Any]],
    lower: Callable[[int], Sequence[Any]],
    over: Callable[..., Any] = map,
    more: Key | None = None,
) -> list[list[Any]]:
    """Programs of all replicas, from those of the first replica of each kind.

    Args:
        lowered: Programs of the first replica of each kind before compilation, by replica.
        lower: From the number of a replica to its programs before compilation; for programs that
            are bound to devices and must be traced for each replica.
        over: Like `map`, perhaps on several threads.

    Returns:
        For each replica its programs, in the order of `lower`.
    """
    firsts = first_of_kind(replicas, more)
    others = [(k, i) for k, i in enumerate(firsts) if k != i]
    portables = {i: [portable(program) for program in compiled[i]] for _, i in others}
    again: dict[int, list[Any]] = {}  # programs that are not portable, before compilation
    for k, i in others:
        again[k] = [
            None if ours is not None else lowered_for(program, replicas[k].devices)
            for ours, program in zip(portables[i], lowered[i], strict=True)
        ]
        if any(a is None and b is None for a, b in zip(portables[i], again[k], strict=True)):
            again[k] = list(lower(k))

    def made(task: tuple[int, int]) -> Any:
        k, n = task
        if k in compiled:
            return compiled[k][n]
        ours = portables[firsts[k]][n]
        return ours.on(replicas[k].devices) if ours is not None else again[k][n].compile()

    nums = [len(compiled[i]) for i in firsts]
    flat = iter(over(made, [(k, n) for k, num in enumerate(nums) for n in range(num)]))
    return [[next(flat) for _ in range(num)] for num in nums]


def for_each(
    replicas: Sequence[Replica], lower: Callable[[int], Any], more: Key | None = None
) -> list[Any]:
    """One program, compiled for every replica.

    Args:
        lower: From the number of a replica to its program before compilation.
    """
    firsts = sorted(set(first_of_kind(replicas, more)))
    lowered = {i: [lower(i)] for i in firsts}
    compiled = {i: [program.compile()] for i, [program] in lowered.items()}
    programs = for_others(replicas, lowered, compiled, lambda i: [lower(i)], more=more)
    return [program for [program] in programs]


def named_texts(
    lowered: Sequence[Sequence[Any]], num: int, microbatch: str = "", update: str = ""
) -> Iterator[tuple[str, str]]:
    """The texts of the programs of replicas, which processes compare.

    Args:
        lowered: Programs of each replica: those of microbatches, then those of the update.
        num: Number of programs of microbatches.
        microbatch: A text in place of these, if devices have unlike ones.
        update: A text in place of the update, if replicas have unlike ones.
    """
    for i, programs in enumerate(lowered):
        suffix = f" of replica {i}" if i else ""
        yield f"update program{suffix}", update or text_of(programs[num:])
        yield f"microbatch program{suffix}", microbatch or text_of(programs[:num])


def orders_of(programs: Sequence[Any], sums: Sequence[Any] = ()) -> dict[str, str]:
    """The order in which XLA runs the collectives of compiled programs, which processes compare.

    Gloo and NCCL match collectives by the order of calls, and processes that compile for
    themselves may order them differently.

    Args:
        programs: Programs of a replica, whose devices send arrays of one size.
        sums: Programs over replicas; unlike devices send arrays of unlike sizes.
    """
    orders = ["\n".join(_COLLECTIVE.findall(program.as_text())) for program in programs]
    orders += ["\n".join(_COLLECTIVE_WITHOUT_SHAPE.findall(p.as_text())) for p in sums]
    return {"the order in which XLA runs collectives": "\n".join(orders)}


def text_of(programs: Sequence[Any]) -> str:
    """The text of programs before compilation."""
    return "".join(program.as_text() for program in programs)
