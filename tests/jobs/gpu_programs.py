"""Compiles what a plan runs for cards that are not here, and prints what the programs hold.

    PYTHONPATH=tests python tests/jobs/gpu_programs.py PLAN [CARD]

A process of its own, because XLA reads its flags and the plugin its environment when they start:
see `test_gpu_compile.py`, which starts it.
"""

import collections
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax._src.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from support.inside.job import JobContext
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu_parts"))

import gpt
import gpu_jobs

import hxla
from support import families, scanned_models
from support.gpu_compiler import (
    CARDS,
    cards,
    compiled_programs,
    launch_files,
    launches,
    moved_bytes,
)
from support.inside.graph import PrecisionCalls, trace_functional
from support.inside.jax import as_function, multiprocessors, ordered
from support.inside.lower import Programs, UpdateInputs, _updates, compiler_options, lower
from support.inside.model import functional
from support.inside.plan import as_precision

NUM, SIZE, LENGTH = 4, 2, 32  # microbatches, their examples, positions of the small GPT


class FusedBlock(gpt.Block):
    """With cuDNN's attention, which jax refuses in the float32 of its trace."""

    def attention(self, qkv_BTN3H: jax.Array) -> jax.Array:
        qkv = jnp.moveaxis(qkv_BTN3H, 3, 0)
        return jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="cudnn")


def small_gpt(
    precision: str | None = None, config: Any = None, block: type[gpt.Block] = gpt.Block
) -> hxla.Job:
    """Of a GPT whose arrays nobody made."""
    sizes = {"vocabulary": 64, "length": LENGTH, "width": 32, "heads": 4, "layers": 2}
    model = nnx.eval_shape(lambda: gpt.GPT(nnx.Rngs(0), **sizes, block=block))
    data = {"text": jax.ShapeDtypeStruct((64, LENGTH + 1), np.int32)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return hxla.Job(
        model,
        data,
        gpt.loss,
        optimizer,
        batch_size=NUM * SIZE,
        precision=precision,
        config=config or {},
    )


def large_gpt() -> hxla.Job:
    """What benchmarks/gpu_parts/gpt_run.py trains."""
    size = gpu_jobs.SIZES["124m"]
    data = {"text": jax.ShapeDtypeStruct((64, size.length + 1), np.int32)}
    model = nnx.eval_shape(size.make)
    return hxla.Job(model, data, size.loss, gpu_jobs.gpt_optimizer(), batch_size=NUM * SIZE)


def perceptron() -> hxla.Job:
    """What benchmarks/gpu_parts/dispatch.py trains."""
    shapes = {"x": (64, 32), "y": (64, 10)}
    data = {k: jax.ShapeDtypeStruct(shape, np.float32) for k, shape in shapes.items()}
    model = nnx.eval_shape(gpu_jobs.perceptron)
    return hxla.Job(model, data, gpu_jobs.squares, optax.adam(1e-3), batch_size=NUM * SIZE)


fused_gpt = functools.partial(small_gpt, "bf16", block=FusedBlock)

PLANS: dict[str, tuple[Callable[[], hxla.Job], dict[str, Any]]] = {
    "data": (small_gpt, {"mesh": {"data": 2}}),
    "data, float sums": (small_gpt, {"mesh": {"data": 2}, "reduction": "float"}),
    "data, float sums in 16 bits": (
        functools.partial(small_gpt, "bf16", {"communication": {"dtype": "bfloat16"}}),
        {"mesh": {"data": 2}, "reduction": "float"},
    ),
    "tensor": (small_gpt, {"mesh": {"data": 2, "tensor": 2}, "rules": "decoder"}),
    "sequence": (small_gpt, {"mesh": {"sequence": 2}}),
    "pipeline": (small_gpt, {"mesh": {"data": 2, "stage": 2}}),
    "tensor stages": (small_gpt, {"mesh": {"stage": 2, "tensor": 2}, "rules": "decoder"}),
    "bf16": (functools.partial(small_gpt, "bf16"), {"mesh": {"data": 1}}),
    "fp16": (functools.partial(small_gpt, "fp16"), {"mesh": {"data": 1}}),
    "fp8": (functools.partial(small_gpt, "fp8"), {"mesh": {"data": 1}}),
    "fused attention": (fused_gpt, {"mesh": {"data": 1}}),
    "fused attention over tensor": (
        fused_gpt,
        {"mesh": {"data": 2, "tensor": 2}, "rules": "decoder"},
    ),
    "fused attention in stages": (fused_gpt, {"mesh": {"stage": 2}}),
    "124 million parameters": (large_gpt, {"mesh": {"data": 1}}),
    "perceptron": (perceptron, {"mesh": {"data": 1}}),
}


def lowered(
    job: hxla.Job, wishes: dict[str, Any], card: str = "h100", size: int = SIZE
) -> Programs:
    """The programs of one of the plans."""
    num = math.prod(wishes["mesh"].values())
    device = hxla.Device(kind=CARDS[card].kind, memory_bytes=CARDS[card].memory_gib * 2**30)
    cluster = hxla.Cluster(name="", devices=(device,) * num)
    plan = job.plan(cluster, auto=False, microbatch_size=size, **wishes)
    return lower(JobContext(job).training(size, 0), job.graph(size), plan, cards(num, card))


#: Names of programs in the tests, and those that are not looked at.
_SHORT = {
    "a microbatch": "microbatch",
    "the stages' slots": "fill",
    "the ticks": "ticks",
    "the stages' sums": "finish",
    "empty sums": "empty",
    "the update": "update",
}
_UNSEEN = ("empty buffers", "a sum in the update")


def compiled(programs: Programs) -> dict[str, Any]:
    """The programs of the first replica and of the sums, by name; all are compiled and adopted."""
    found = dict(compiled_programs(programs))
    return {_SHORT.get(name, name): p for name, p in found.items() if name not in _UNSEEN}


def evaluation(programs: Programs) -> Any:
    """The program that evaluates a microbatch of the small GPT."""
    text = jax.ShapeDtypeStruct((SIZE, LENGTH + 1), np.int32)
    return programs.evaluation._forward.compile(np.int32(0), {"text": text})[0]


def predicted_bytes(job: hxla.Job) -> float:
    """Of a card that trains it alone, as a plan says where nothing was measured or compiled.

    Rates: NVIDIA, "H100 Tensor Core GPU" data sheet, dense.
    """
    rate = hxla.Rate(dtype="float32", flops_per_second=67e12, source="data sheet")
    h100 = CARDS["h100"]
    card = hxla.Device(
        kind=h100.kind,
        memory_bytes=h100.memory_gib * 2**30,
        rates=(rate,),
        memory_bytes_per_second=h100.bytes_per_second,
    )
    cluster = hxla.Cluster(name="one", devices=(card,))
    [device] = job.plan(cluster, microbatch_size=SIZE).prediction.devices
    return device.memory_bytes


def plain_step() -> Any:
    """The loop that hxla is compared with, compiled for one card."""
    size, sharding = gpu_jobs.SIZES["tiny"], SingleDeviceSharding(cards(1)[0])
    graphdef, params, rest = nnx.split(nnx.eval_shape(size.make), nnx.Param, ...)
    optimizer = gpu_jobs.gpt_optimizer()
    shapes = params, jax.eval_shape(optimizer.init, params)
    here = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (*shapes, {"text": jax.ShapeDtypeStruct((NUM, SIZE, size.length + 1), np.int32)}),
    )
    return gpu_jobs.scanned(graphdef, rest, size.loss, optimizer).lower(*here).compile()


def _dtypes(collective: Any) -> str:
    """Those that travel together; an array is written `f32[8,16]` or `2 x f32[8,16]`."""
    return "+".join(sorted({re.sub(r"\d+ x |\[.*", "", array) for array in collective.arrays}))


def _racing_scatters(text: str) -> Iterator[str]:
    """Scatters whose order of additions is anybody's: of floats, to indices that may be equal."""
    for line in text.splitlines():
        is_scatter = re.search(r"= \(?(f32|bf16|f16)\S* scatter\(", line)
        if is_scatter and "unique_indices=true" not in line:
            yield line.strip()[:200]


def _products(text: str) -> list[str]:
    """The dtypes of each matrix product's result and operands, such as `bf16 = bf16 x bf16`."""
    dtypes = dict(re.findall(r"%?([\w.-]+) = \(?(\w+)\[", text))
    found = []
    for line in text.splitlines():
        called = re.search(r"= \(?(\w+)\[.* (?:dot|convolution|custom-call)\(([^)]*)\)", line)
        if called and re.search(r" dot\(| convolution\(|__cublas|__cudnn", line):
            operands = re.findall(r"%([\w.-]+)", called[2])[:2]
            found.append(f"{called[1]} = " + " x ".join(dtypes.get(x, "?") for x in operands))
    return found


def _widest_sort(text: str) -> int:
    """The most elements that a sort orders; one block of threads sorts 4096, without others."""
    sorts = re.findall(r"= \(?\w+\[([\d,]+)\].* sort\(.*dimensions=\{(\d+)\}", text)
    return max((int(shape.split(",")[int(dim)]) for shape, dim in sorts), default=0)


def told(program: Any) -> dict[str, Any]:
    """What a compiled program holds."""
    found = hxla.inspect(program).main
    text, stats = program.as_text(), program.memory_analysis()
    return {
        "collectives": sorted(
            {f"{c.kind} of {_dtypes(c)} over {c.over}" for c in found.collectives}
        ),
        "transfers": [t.kind for t in found.transfers],
        "problems": list(found.problems),
        "custom_calls": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))),
        "products": _products(text),
        "has_bf16": "bf16[" in text,
        "racing_scatters": list(_racing_scatters(text)),
        "widest_sort": _widest_sort(text),
        "loops": len(re.findall(r" while\(", text)),
        "argument_bytes": stats.argument_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "donated_bytes": stats.alias_size_in_bytes,
    }


def step() -> dict[str, dict[str, int]]:
    """What a step of a small GPT of benchmarks/gpu_parts launches and moves, by program.

    XLA writes what programs launch into the folder of `--xla_dump_to`.
    """
    size = gpu_jobs.Size(
        vocabulary=256, length=64, width=64, heads=2, layers=1, num_microbatches=8, dtype="bfloat16"
    )
    data = {"text": jax.ShapeDtypeStruct((64, size.length + 1), np.int32)}
    model = nnx.eval_shape(size.make)
    job = hxla.Job(model, data, size.loss, gpu_jobs.gpt_optimizer(), batch_size=8 * 4)
    programs = compiled(lowered(job, {"mesh": {"data": 1}}, size=4))
    modules = {hxla.inspect(p).main.name: name for name, p in programs.items()}
    found = {}
    for module, path in launch_files():
        found[modules.get(module, module)] = launches(path.read_text())
    for name, program in programs.items():
        found[name]["bytes"] = moved_bytes(program.as_text())
    return found


def _bytes(tree: Any) -> int:
    """Of one device's part."""
    leaves = jax.tree.leaves(tree)
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x in leaves
    )


class _Host(NamedTuple):
    """Tells that an array is in host memory: cards that are not here know no kinds of memory."""

    axis: str = "host"

    def of(self, sharding: Any, kind: str) -> Any:
        """The sharding that stands for a kind of memory."""
        if kind == "device":
            return sharding
        [card] = sharding.device_set
        return NamedSharding(Mesh(np.array([card]), (self.axis,)), PartitionSpec())

    def kind_of(self, sharding: Any) -> str | None:
        """What jax asks of it when it lowers."""
        names = getattr(getattr(sharding, "mesh", None), "axis_names", ())
        return "pinned_host" if names == (self.axis,) else None


def offloaded() -> dict[str, Any]:
    """Some of the programs that update the state of `large_gpt` from host memory."""
    host = _Host()
    _updates.in_memory, mlir._get_mem_kind = host.of, host.kind_of
    size = gpu_jobs.SIZES["124m"]
    data = {"text": jax.ShapeDtypeStruct((64, size.length + 1), np.int32)}
    config = {"memory": {"offload": {"optimizer": "host"}}}
    model = nnx.eval_shape(size.make)
    optimizer = optax.adamw(1e-3)
    job = hxla.Job(model, data, size.loss, optimizer, batch_size=NUM * SIZE, config=config)
    programs = lowered(job, {"mesh": {"data": 1}})
    params, aux, opt_state = programs.state_layout.like(0)
    tensors = programs.tensors
    scales = jax.ShapeDtypeStruct((len(tensors.floats),), np.int32)
    sums = programs.reducer.result_shapes(0)
    exponents, one = programs.reducer.local[0].like(scales), np.float32(1)
    given = UpdateInputs(*sums, exponents_T=exponents, weight=one, value=one)
    [update] = programs._updates.each
    every = update.lower(programs._of_trained(params), opt_state, aux, given)
    groups = update.groups
    sizes = [sum(unit.num_bytes for unit in group) for group in groups.groups]
    found = []
    for g in (1, len(sizes) // 2, len(sizes) - 1):
        program = every[g].compile()
        stats, text = program.memory_analysis(), program.as_text()
        found.append(
            {
                "group": g,
                "host_in_bytes": stats.host_argument_size_in_bytes,
                "host_out_bytes": stats.host_output_size_in_bytes,
                "temporary_bytes": stats.temp_size_in_bytes,
                "new_bytes": stats.output_size_in_bytes - stats.alias_size_in_bytes,
                "copies": len(re.findall(r" copy-start\(", text)),
            }
        )
    return {
        "group_bytes": sizes,
        "state_bytes": _bytes([x for x in jax.tree.leaves(opt_state) if x.shape]),
        "param_bytes": _bytes(params),
        "programs": found,
    }


def waiting() -> dict[str, int]:
    """Bytes of a layer of the GPT of examples/ that wait for its backward, by precision.

    Of what a layer's compiled forward gives: the residuals, and what the next layer reads.
    """
    model = nnx.eval_shape(lambda: gpt.GPT(nnx.Rngs(0)))
    data = {"text": jax.ShapeDtypeStruct((64, gpt.LENGTH + 1), np.int32)}
    config = {"memory": {"recompute": "boundaries"}}
    found = {}
    for word in ("fp32", "bf16", "fp16"):
        job = hxla.Job(
            model, data, gpt.loss, optax.adamw(1e-3), batch_size=16, precision=word, config=config
        )
        programs = lowered(job, {"mesh": {"data": 1}}, size=8)
        [runner] = programs.runners
        params, aux, _ = programs.state_layout.like(0)
        exponents = jax.ShapeDtypeStruct((len(programs.tensors.floats),), np.int32)
        made = runner.lower(params, aux, programs.reducer.local[0].like(exponents))
        # Parts that are alike share a program: the most are layers.
        [(layer, num)] = collections.Counter(runner._programs.same).most_common(1)
        assert num >= gpt.LAYERS - 2
        places = [(i, name) for i, own in runner._programs._jitted.items() for name in own]
        forward = made[places.index((layer, "forward"))].compile()
        found[word] = forward.memory_analysis().output_size_in_bytes
    return found


def cut_segments() -> dict[str, dict[str, Any]]:
    """What the programs of stage 3 hold, of two copies that two cards each cut."""
    job = small_gpt(config={"memory": {"zero": 3, "recompute": "boundaries"}})
    mesh = {"data": 2, "tensor": 2}
    programs = lowered(job, {"mesh": mesh, "rules": "decoder"})
    made: dict[str, list[Any]] = {"segments": [], "updates": [], "sums": [], "gathers": []}

    def over(compile_one: Callable[[Any], Any], lowered: Any) -> list[Any]:
        found = []
        for name, program in lowered:
            found.append(compile_one((name, program)))
            kinds = {"the update": "updates", "a sum in the update": "updates"}
            kinds |= {"the sum of gradients": "sums", "the gather of parameters": "gathers"}
            made[kinds.get(name, "segments")].append(found[-1])
        return found

    programs.compile(over)
    return {
        kind: {
            "collectives": sorted({c for program in own for c in told(program)["collectives"]}),
            "problems": [problem for program in own for problem in told(program)["problems"]],
        }
        for kind, own in made.items()
    }


def scanned() -> Any:
    """A model with its layers as one scan, its loss and its data."""
    return scanned_models.LinenNet(dropout=0.1), scanned_models.loss, scanned_models.data()


def products_of_families() -> dict[str, dict[str, int]]:
    """Of the gradient of each family of models in bfloat16 the products, by dtypes."""
    made = {**families.FAMILIES, "scanned": scanned}
    sharding, found = SingleDeviceSharding(cards(1)[0]), {}
    for name, make in made.items():
        model, loss, batch = make()
        batch = jax.tree.map(lambda x: x[:2], batch)
        plain = functional(model, loss, loss, variables=None, seed=0, example=batch)
        calls = PrecisionCalls(plain, as_precision("bf16"))
        graph = trace_functional(calls.model, batch)
        shapes = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding)
            for v in graph.program.jaxpr.invars
        ]
        program, num = as_function(graph.program), len(graph.param_values)

        def gradient(params: Any, *rest: Any, program: Any = program) -> Any:
            return jax.grad(lambda own: program(*own, *rest)[0])(params)

        exact = jax.jit(gradient, compiler_options={"xla_allow_excess_precision": False})
        text = exact.lower(shapes[:num], *shapes[num:]).compile().as_text()
        found[name] = collections.Counter(_products(text))
    return found


def gradients() -> dict[str, dict[str, Any]]:
    """Functions whose gradients are scatters, compiled in order, and some as they are written."""
    card = SingleDeviceSharding(cards(1)[0])

    def like(*shape: int, dtype: Any = np.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=card)

    def pooled(x: Any) -> Any:
        return nnx.max_pool(x, (3, 3), (2, 2), "SAME").astype(jnp.float32).sum()

    def sums(x: Any, ids: Any) -> Any:
        return jax.ops.segment_sum(x, ids, 1000)

    ids, low = like(4096, dtype=np.int32), jnp.bfloat16
    made = {
        "lookup": (
            jax.grad(lambda t, ids: (t[ids] ** 2).astype(jnp.float32).sum()),
            like(50304, 768, dtype=low),
            ids,
        ),
        "positions": (jax.grad(lambda t: (t[jnp.arange(1000)] ** 2).sum()), like(1024, 768)),
        "labels": (
            jax.grad(lambda x, ids: jnp.take_along_axis(x, ids[:, None], axis=1).sum()),
            like(4096, 512),
            ids,
        ),
        "max-pool": (jax.grad(pooled), like(8, 112, 112, 64, dtype=low)),
        "sort": (jax.grad(lambda x: (jnp.sort(x, axis=1) * x).sum()), like(8, 4096)),
        "median": (jax.grad(lambda x: jnp.median(x, axis=1).sum()), like(8, 4096)),
        "segment_sum": (sums, like(4096, 256), ids),
        "elements": (jax.grad(lambda x, i, j: x[i, j].sum()), like(512, 512), ids, ids),
    }
    options = compiler_options("gpu", hxla.SumsForm())
    found = {}
    for name, (function, *arguments) in made.items():
        kinds = {"ordered": ordered(function)}
        kinds |= {"plain": function} if name in ("sort", "segment_sum") else {}
        for kind, written in kinds.items():
            jitted = jax.jit(written, compiler_options=options)
            facts = told(jitted.lower(*arguments).compile())
            kept = ("widest_sort", "loops", "racing_scatters", "temporary_bytes")
            found[f"{kind} {name}"] = {key: facts[key] for key in kept}
    return found


ALONE = {
    "gradients": gradients,
    "offload": offloaded,
    "waiting": waiting,
    "families": products_of_families,
    "multiprocessors": lambda: {k: multiprocessors(cards(1, k)[0]) for k in CARDS},
    "cut segments": cut_segments,
    "plain": lambda: told(plain_step()),
    "step": step,
}


def main() -> None:
    if sys.argv[1] in ALONE:
        print(json.dumps(ALONE[sys.argv[1]]()))
        return
    make, wishes = PLANS[sys.argv[1]]
    job = make()
    programs = lowered(job, wishes, *sys.argv[2:])
    found = {k: told(program) for k, program in compiled(programs).items()}
    params, aux, opt_state = programs.state_layout.like(0)
    facts = {"state_bytes": _bytes((params, aux, opt_state)), "param_bytes": _bytes(params)}
    if make is small_gpt and not programs.pipelines:
        found["evaluation"] = told(evaluation(programs))
    if make is large_gpt:
        facts["memory_bytes"] = programs.memory_bytes(facts["state_bytes"])
        facts["predicted_bytes"] = predicted_bytes(job)
    print(json.dumps(facts | {"programs": found}))


if __name__ == "__main__":
    main()
