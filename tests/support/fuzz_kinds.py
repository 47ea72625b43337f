"""Every kind of file that hxla reads: one to begin with, and what is done with one it accepts."""

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Callable

import hxla
from hxla import LayerSize, LayerTime, Profile, Setting, load_profile
from support.inside.choose import ChainWork, propose
from support.inside.core import as_config
from support.inside.inspect import lanes_of_file, last_step
from support.inside.profile import dump_profile, merge_profiles
from support.inside.report import FILE_NAME, MetricsWriter
from support.inside.schedule import perfetto
from support.inside.scheduler import read_jobs
from support.inside.session import plans_from_table
from support.overlapped_replay import replay
from support.paths import DATA, ROOT

DUMPS = DATA / "dumps" / "jax-0.12"
_SEARCHED = 16  # devices of a cluster that is searched
_REPLAYED = 2000  # forwards of a schedule that is replayed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file.

    Attributes:
        name: Of the file, which may say what it is.
        text: What a right one holds.
        use: Reads a file and uses what it is read as; raises `hxla.HxlaError` if it is refused.
        is_packed: Whether the file is that, packed by gzip.
    """

    name: str
    text: bytes
    use: Callable[[pathlib.Path], object]
    is_packed: bool = False


_JOBS = b"""name,time,steps,microbatches,min_devices,kind,mixed,gang,seconds_V100,seconds_T4
first,0,1000,8,1,V100,1,4,0.5,1.4
short,60,50,4,2,T4,0,,0.2,0.6
"""


def use_jobs(path):
    jobs, _ = read_jobs(path)
    kinds = tuple(c.kind for c in jobs[0].capabilities)
    for job in jobs[:3]:
        if job.num_microbatches <= _REPLAYED and len(kinds) <= _SEARCHED:
            assert job.step_seconds((2,) * len(kinds)) > 0


def plan_text() -> bytes:
    """A plan of everything: several copies of several stages of several devices."""
    axes = [{"name": "stage", "size": 2}, {"name": "tensor", "size": 2, "roles": ["split"]}]
    segments = [
        {"name": f"layer {i}", "first": 3 * i, "part": i // 2, "keep": "inputs"} for i in range(4)
    ]
    table = {
        "made_with": {"hxla": "1", "jax": "0.10.0", "jaxlib": "0.10.0"},
        "batch_size": 32,
        "microbatch_size": 4,
        "devices": [{"rank": i, "kind": f"cpu@{1 / (1 + i // 4)}"} for i in range(8)],
        "axes": axes,
        "replicas": [
            {"devices": [0, 1, 2, 3], "num_microbatches": 5},
            {"devices": [4, 5, 6, 7], "num_microbatches": 3},
        ],
        "pipeline": {"segments": segments, "schedule": "1f1b"},
        "parameters": [
            {
                "name": f"layer{i}/kernel",
                "shape": [8, 16],
                "dtype": "float32",
                "spec": [[], ["tensor"]],
            }
            for i in range(4)
        ],
        "prediction": {
            "step_seconds": 0.5,
            "bound_seconds": 0.4,
            "microbatch_seconds": [0.1, 0.2],
            "fixed_seconds": [0.01, 0.02],
            "devices": [{"rank": i, "memory_bytes": 1e6, "compute_seconds": 0.4} for i in range(8)],
        },
        "runners_up": [{"description": "another", "step_seconds": 0.6}],
        "reasons": ["because"],
    }
    return json.dumps(table, indent=1).encode()


def use_plan(path: pathlib.Path) -> None:
    """All that can be asked of a plan without its job."""
    plan = hxla.Plan.read(path)
    use_of_plan(plan)
    assert hxla.Plan.from_json(plan.to_json()) == plan
    lanes_of_file(path)


def use_of_plan(plan: hxla.Plan) -> None:
    """Words, numbers and schedules of a plan."""
    plan.explain()
    plan.compare(plan)
    assert not plan.diff(plan)
    hash((plan.numerics, plan.replica_names, plan.stage_names, plan.device_parameter_bytes))
    assert plan.with_counts(plan.counts).decisions == plan.decisions
    if plan.pipeline is not None and isinstance(plan.pipeline.schedule, str):
        for count in set(plan.counts) - {0}:
            chunks = plan.pipeline.num_chunks
            made = hxla.make_schedule(plan.pipeline.schedule, plan.num_stages, count, chunks)
            use_schedule_value(made)


def chain(layers: tuple[str, ...], sizes: tuple[int, ...] = (4,)) -> ChainWork:
    """A model to plan for."""
    size = LayerSize(parameter_bytes=2e6, output_bytes=1e4, stash_bytes=1e5, flops=1e8)
    return ChainWork(
        layers=layers,
        sizes={(b, 1): (size,) * len(layers) for b in sizes},
        sent_bytes={},
        input_bytes=dict.fromkeys(sizes, 1000),
        batch_size=16 * sizes[0],
        state_factor=4.0,
    )


def profile_value(kinds: tuple[str, ...] = ("cpu@1", "cpu@0.5")) -> Profile:
    """Measured times of four layers."""
    layers = ("embed", "block 0", "block 1", "head")
    time = LayerTime(forward=0.01, backward=0.02, update=0.001)
    size = LayerSize(parameter_bytes=2e6, output_bytes=1e4, stash_bytes=1e5)
    return Profile(
        model="net",
        layers=layers,
        sizes={(4, 1): (size,) * 4},
        times={Setting(kind, 4): (time,) * 4 for kind in kinds},
        reductions={" + ".join(sorted(kinds)): 0.003},
        peaks={Setting(kind, 4): 50_000_000 for kind in kinds},
        num_segments=4,
    )


def use_profile(path: pathlib.Path) -> None:
    """A search with a profile, and the profile written, read and merged."""
    profile = load_profile(path)
    dump_profile(profile, path.with_name("again.json"))
    assert load_profile(path.with_name("again.json")) == profile
    merge_profiles([profile, profile])
    own = tuple(s for s in profile.times if s.tensor == 1)
    if not own or len(profile.layers) > 100 or own[0].microbatch_size > 1000:
        return
    size = own[0].microbatch_size
    devices = tuple(hxla.Device(kind=s.kind) for s in own if s.microbatch_size == size)
    cluster = hxla.Cluster(name="of the profile", devices=devices[:_SEARCHED])
    work = chain(profile.layers, (size,))
    propose(work, cluster, profile)[0].prediction.model_dump_json()


def use_mesh(path: pathlib.Path) -> None:
    """Links between all devices, and a search for a model."""
    from support.inside.cluster import dump_cluster

    cluster = hxla.load_cluster(str(path))
    dump_cluster(cluster)
    some = range(min(len(cluster.devices), _SEARCHED))
    for i in some:
        for j in some:
            link = cluster.link(i, j)
            if link is not None:
                assert link.latency_seconds + 1e6 / link.bytes_per_second >= 0
    if len(cluster.devices) <= _SEARCHED:
        found, _ = propose(chain(("a", "b", "c")), cluster, None)
        found.prediction.model_dump_json()


NAMES = [
    f"{stack}/layers_{i}/{part}/{leaf}"
    for stack in ("encoder", "decoder")
    for i in range(12)
    for part in (
        "attention/query",
        "attention/out",
        "mlp/up_proj",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
    )
    for leaf in ("kernel", "bias")
]


def use_rules(path: pathlib.Path) -> None:
    """The cuts of a model's parameters."""
    rules = hxla.load_rules(str(path))
    shapes = [(64, 64) if name.endswith("kernel") else (64,) for name in NAMES]
    rules.resolve(NAMES, shapes, {"data": 2, "tensor": 4, "fsdp": 2}).report()
    str(rules)


def use_config(path: pathlib.Path) -> None:
    """The settings, and a schedule if they hold one."""
    config = as_config(path, {})
    hxla.Config.model_validate_json(config.model_dump_json())
    if not isinstance(config.pipeline.schedule, str):
        use_schedule_value(hxla.schedule_from_table(config.pipeline.schedule))
    # As they are used: time-outs become whole milliseconds.
    int(config.watchdog.heartbeat_timeout_seconds * 1000)
    int(config.watchdog.progress_timeout_seconds * 1000)
    config.communication.bucket_mib << 18


def use_schedule_value(schedule: hxla.Schedule) -> None:
    """A schedule's figures and its replay."""
    hash((schedule.bubble, schedule.peak_stash, schedule.written))
    num = schedule.num_stages * schedule.num_chunks
    if num * schedule.num_microbatches <= _REPLAYED:
        times = [1.0] * num
        assert replay(schedule, times, times, weight_seconds_P=times).makespan_seconds > 0


def use_schedule(path: pathlib.Path) -> None:
    """As a setting of its own, which is how a file has it."""
    use_config(path)


def use_dump(path: pathlib.Path) -> None:
    """What `hxla inspect` prints and writes."""
    found = hxla.inspect(path)
    found.text()
    found.to_json()


def use_bits(path: pathlib.Path) -> None:
    """What `hxla inspect --bits` prints of it and another."""
    found = hxla.inspect_bits(path, bits_value())
    found.text()
    found.to_json()


def bits_value() -> hxla.BitsRecord:
    """Two equations, the second of which reads what the first makes."""
    runs = [
        hxla.RecordedRun(i % 2, (hxla.RecordedRead(i - 1, "a" * 64),), ("b" * 64,))
        for i in range(6)
    ]
    names = ("mul", "add")
    equations = [hxla.RecordedEquation(primitive=n, results=("f32[2]",)) for n in names]
    return hxla.BitsRecord(
        device="cpu cpu",
        made_with=hxla.Versions(hxla="0.2.0", jax="0.10.2", jaxlib="0.10.2"),
        microbatch_size=2,
        inputs=(("w", "c" * 64),),
        equations=tuple(equations),
        runs=tuple(runs),
    )


def use_trace(path: pathlib.Path) -> None:
    """The last step of a profile."""
    program = hxla.inspect(DUMPS / "module_0000.fsdp.cpu_after_optimizations.txt.gz").main
    last_step(path, [dataclasses.replace(program, name="jit_step")]).mean_seconds()


def use_timeline(path: pathlib.Path) -> None:
    """A predicted step as a page draws it."""
    lanes = lanes_of_file(path)
    for lane in range(len(lanes.names)):
        lanes.busy_seconds(lane, lanes.bars[0].kind)


def use_checkpoint(path: pathlib.Path) -> None:
    """The plans that a checkpoint's small facts hold."""
    if not path.is_file():
        return  # tests/checkpoint/test_damaged_checkpoints.py has such
    try:
        meta = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # Orbax's own to tell
    for plan in plans_from_table(meta, until=100).values():
        use_of_plan(plan)


def use_metrics(path: pathlib.Path) -> None:
    """A file of an earlier run, to which this one appends."""
    folder = path.with_name("run")
    folder.mkdir(exist_ok=True)
    path.rename(folder / FILE_NAME)
    writer = MetricsWriter(folder)
    writer.write(hxla.EvalRecord(step=1, loss=1.0, metrics={}, num_examples=1, seconds=0.1))
    writer.close()


def _trace() -> bytes:
    records: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/host:CPU"}}
    ]
    for step in range(3):
        for k in range(4):
            args = {"hlo_op": f"dot.{k}", "hlo_module": "jit_step", "run_id": str(step)}
            at = {"ts": 1000.0 * step + 100 * k, "dur": 90.0}
            records.append({"ph": "X", "pid": 1, "tid": 7, "name": f"dot.{k}", "args": args, **at})
    return json.dumps({"traceEvents": records}).encode()


def _timeline() -> bytes:
    schedule = hxla.make_schedule("1f1b", 2, 4)
    return perfetto(replay(schedule, [1.0, 2.0], [2.0, 3.0], send_seconds_P=[0.1])).encode()


def _unpacked(name: str) -> bytes:
    return gzip.decompress((DUMPS / name).read_bytes())


def kinds() -> dict[str, Kind]:
    """All of them, by name."""
    schedule = [list(tick) for tick in hxla.make_schedule("1f1b", 2, 3).written]
    plan = json.loads(plan_text())
    rows = [{"first_step": 0, "plan": plan}, {"first_step": 7, "counts": [4, 4]}]
    lines = "".join(f'{{"kind":"step","step":{i},"loss":0.5}}\n' for i in range(50))
    optimized = "module_0000.fsdp.cpu_after_optimizations"
    table = profile_value().to_table()
    return {
        "plan": Kind(name="plan.json", text=plan_text(), use=use_plan),
        "bits": Kind(name="bits.json", text=bits_value().model_dump_json().encode(), use=use_bits),
        "profile": Kind(
            name="profile.json",
            text=json.dumps({"version": 1, **table}, indent=1).encode(),
            use=use_profile,
        ),
        "mesh": Kind(
            name="mesh.toml",
            text=(ROOT / "meshes/whale-8v100-8p100.toml").read_bytes(),
            use=use_mesh,
        ),
        "small mesh": Kind(
            name="small.toml",
            text=(ROOT / "meshes/workstation-2x3090-4090.toml").read_bytes(),
            use=use_mesh,
        ),
        "rules": Kind(
            name="rules.toml", text=(ROOT / "rules/decoder.toml").read_bytes(), use=use_rules
        ),
        "config TOML": Kind(
            name="config.toml",
            text=(
                b'[pipeline]\nnum_micro_batch = 4\nschedule = "1f1b"\n'
                b'[memory]\nrecompute = "none"\n'
                b"[cluster]\nvisible_devices = [0, 1]\nlayout = [[0], [1]]\n"
                b"[communication]\nclip_norm = 0.5\nbucket_mib = 64\n"
                b"[watchdog]\nheartbeat_timeout_seconds = 8.0\n"
            ),
            use=use_config,
        ),
        "config JSON": Kind(
            name="config.json",
            text=json.dumps(hxla.Config().model_dump(mode="json"), indent=1).encode(),
            use=use_config,
        ),
        "schedule": Kind(
            name="schedule.json",
            text=json.dumps({"pipeline": {"schedule": schedule}}, indent=1).encode(),
            use=use_schedule,
        ),
        "timeline": Kind(name="timeline.json", text=_timeline(), use=use_timeline),
        "trace": Kind(name="step.trace.json.gz", text=_trace(), use=use_trace, is_packed=True),
        "HLO text": Kind(
            name=f"{optimized}.txt", text=_unpacked(f"{optimized}.txt.gz"), use=use_dump
        ),
        "packed HLO text": Kind(
            name=f"{optimized}.txt.gz",
            text=_unpacked(f"{optimized}.txt.gz"),
            use=use_dump,
            is_packed=True,
        ),
        "HLO protocol buffer": Kind(
            name="module_0004.nnx_adam.cpu_after_optimizations.hlo.pb",
            text=_unpacked("module_0004.nnx_adam.cpu_after_optimizations.hlo.pb.gz"),
            use=use_dump,
        ),
        "checkpoint": Kind(name="meta.json", text=json.dumps(rows).encode(), use=use_checkpoint),
        "jobs": Kind(name="jobs.csv", text=_JOBS, use=use_jobs),
        "metrics": Kind(name="metrics.jsonl", text=lines.encode(), use=use_metrics),
    }
