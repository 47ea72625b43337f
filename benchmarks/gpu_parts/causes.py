"""What each part of an exact step costs on a card: arrays of the host, loops, lookups and flags.

Everything here is plain JAX, so that a row shows what the card and XLA do, whatever hxla does.
"""

import dataclasses
import statistics
import time

import gpu_jobs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from report import Report, arguments

args = arguments()
report = Report(args.out)
IS_GPU = jax.default_backend() == "gpu"
#: Options of exact mode: additions in a fixed order, untimed kernels, and no excess precision.
ORDERED = {"xla_gpu_exclude_nondeterministic_ops": True} if IS_GPU else {}
UNTIMED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False} if IS_GPU else {}
EXACT = ORDERED | UNTIMED | {"xla_allow_excess_precision": False}
#: One CUDA graph for a loop whose count is an argument.
WHILE = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE"
AS_GRAPH = {"xla_gpu_enable_command_buffer": WHILE} if IS_GPU else {}


def median(run, num=20, warm=3):
    """Seconds of a call, until its results are there."""
    seconds = []
    for i in range(num + warm):
        began = time.perf_counter()
        jax.block_until_ready(run())
        if i >= warm:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def us(seconds):
    return f"{1e6 * seconds:.1f} us"


def host_arrays():
    """Calls with more and more arguments from the host; a hundred calls, one wait."""
    x, none = jnp.zeros(1024), None
    for num in (0, 1, 3):
        small = [np.ones(4, np.int32)] * num
        call = jax.jit(lambda x, *more: x + sum(m.astype(x.dtype).sum() for m in more) + 1)
        compiled = call.lower(x, *small).compile()

        def hundred(compiled=compiled, small=small):
            y = x
            for _ in range(100):
                y = compiled(y, *small)
            return y

        seconds = median(hundred, 5) / 100
        none = none or seconds
        report.row(f"a call with {num} arrays from the host", us(seconds), us(none))
    y = jnp.zeros(4)
    report.row("a small array read back", us(median(lambda: np.asarray(y + 0))))


def loops():
    """A microbatch more of a tiny model, by the form of its loop."""
    graphdef, params, rest = nnx.split(gpu_jobs.perceptron(), nnx.Param, ...)
    sizes = (4, 8) if args.tiny else (32, 256)

    def value(params, part):
        return gpu_jobs.squares(nnx.merge(graphdef, params, rest), part).mean()

    def summed(params, parts, num):
        def body(i, total):
            part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), parts)
            grads = jax.grad(value)(params, part)
            # Integers, as exact sums have them.
            return jax.tree.map(lambda t, g: t + (g * 2.0**20).astype(jnp.int32), total, grads)

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), params)
        return jax.lax.fori_loop(0, num, body, zeros)

    def seconds(num, is_known, options):
        parts = {"x": jnp.zeros((num, 4, 32)), "y": jnp.zeros((num, 4, 10))}
        call = (lambda *xs: summed(*xs, num)) if is_known else summed
        given = (params, parts) if is_known else (params, parts, jnp.int32(num))
        compiled = jax.jit(call).lower(*given).compile(compiler_options=options)
        first, second = compiled(*given), compiled(*given)
        assert all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(second)))
        return median(lambda: compiled(*given), 3 if args.tiny else 15)

    forms = {
        "of known length": (True, EXACT),
        "whose count is an argument": (False, EXACT),
        "whose count is an argument, as one CUDA graph": (False, EXACT | AS_GRAPH),
    }
    first = None
    for name, form in forms.items():
        few, many = (seconds(num, *form) for num in sizes)
        each = (many - few) / (sizes[1] - sizes[0])
        first = first or each
        report.row(f"a loop {name}: a microbatch more", us(each), us(first), f"{each / first:.2f}x")


def gradient_in_order(name, loss, *operands):
    """A gradient with additions in a fixed order, beside any order."""
    seconds = {}
    for options in ({}, ORDERED):
        lowered = jax.jit(jax.grad(loss)).lower(*operands)
        compiled = lowered.compile(compiler_options=options)
        seconds[bool(options)] = median(lambda compiled=compiled: compiled(*operands), 10)
    any_order = seconds[False]
    in_order = seconds.get(True, any_order)
    ratio = f"{in_order / any_order:.2f}x"
    report.row(f"gradient of {name}: in a fixed order, in any", us(in_order), us(any_order), ratio)


def scatters():
    draw = np.random.default_rng(0)
    rows, width = (64, 8) if args.tiny else (50304, 768)
    for num in (64,) if args.tiny else (4096, 8192):
        ids = jnp.asarray(draw.zipf(1.1, num) % rows, jnp.int32)
        table = jnp.zeros((rows, width), jnp.bfloat16)
        gradient_in_order(
            f"a lookup of {num} rows", lambda t, ids: t[ids].astype(jnp.float32).sum(), table, ids
        )
    images = jnp.asarray(
        draw.normal(size=(2, 8, 8, 4) if args.tiny else (64, 112, 112, 64)), jnp.bfloat16
    )
    pool = lambda x: nnx.max_pool(x, (3, 3), (2, 2), "SAME").astype(jnp.float32).sum()  # noqa: E731
    gradient_in_order("a max-pool", pool, images)
    values = jnp.asarray(draw.normal(size=(8, 64 if args.tiny else 1024)), jnp.float32)
    gradient_in_order("a sort", lambda x: jnp.sort(x)[:, ::2].sum(), values)


def flags():
    """The plain step of the GPT, compiled with each of exact mode's options."""
    size = gpu_jobs.SIZES["tiny" if args.tiny else "124m"]
    size = dataclasses.replace(size, block=gpu_jobs.FusedBlock)
    optimizer, num = gpu_jobs.gpt_optimizer(), size.num_microbatches
    parts = gpu_jobs.stacked({"text": size.text()[: num * 4]}, num)
    none = None
    for name, options in {
        "no option": {},
        "additions in a fixed order": ORDERED,
        "kernels that are not timed": UNTIMED,
        "all of exact mode's": EXACT,
    }.items():
        graphdef, params, rest = nnx.split(size.make(), nnx.Param, ...)
        state = [params, optimizer.init(params)]
        step = gpu_jobs.scanned(graphdef, rest, size.loss, optimizer)
        compiled = step.lower(*state, parts).compile(compiler_options=options)

        def run(compiled=compiled, state=state):
            found, *state[:] = compiled(*state, parts)
            return found

        seconds = median(run, 8)
        none = none or seconds
        cells = f"{1e3 * seconds:.2f} ms", f"{1e3 * none:.2f} ms", f"{none / seconds:.3f}x"
        report.row(f"a plain step of the GPT, {name}", *cells)


for part in (host_arrays, loops, scatters, flags):
    report.attempt(part.__name__, part)
