"""What every test shares: the tiers, eight fake devices, programs compiled once for all."""

import collections
import gc
import os
import pathlib
import platform
import random
import subprocess
import tempfile
import time

import hypothesis
import psutil
import pytest

from support import tiers
from support.paths import ROOT

# Children of the tests keep what Python makes of hxla's sources too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Fake devices wait for each other however busy the machine is, and a deadlock still ends.
RENDEZVOUS_SECONDS = 600
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={RENDEZVOUS_SECONDS}",
        f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={RENDEZVOUS_SECONDS}",
    ]
).strip()
# Workers and the processes that tests start share what they compiled, from run to run.
_CACHE = pathlib.Path(tempfile.gettempdir()) / f"hxla-tests-{os.getuid()}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _show_frames_of_hxla():
    """In the traceback of a test that fails, and in no process that a test starts."""
    import jax  # after the settings above

    jax.config.update("jax_traceback_filtering", "off")


def _share_entries_of_all_devices():
    """What one device of the CPU compiled serves the others, as jax's cache does it for GPUs.

    Else the copies of a model, which run the same programs on other devices, each compile them.
    """
    from jax._src import cache_key  # after the settings above

    hashed = cache_key._hash_serialized_compile_options

    def stripped(hash_obj, options, strip_device_assignment=False):
        return hashed(hash_obj, options, strip_device_assignment=True)

    cache_key._hash_serialized_compile_options = stripped


_show_frames_of_hxla()
_share_entries_of_all_devices()


# Tracing makes many objects that stay: by default Python looks through all of them again and again,
# for a twelfth of the tests' time.
gc.set_threshold(20_000, 20, 20)

# However slow or busy a machine is, no example takes too long.
hypothesis.settings.register_profile(
    "any pace",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.load_profile("any pace")

#: Of a worker: two of them, and a job that is larger than its devices, have to fit on one machine.
MOST_BYTES = 3 << 30
#: Linux allows a process 65,530 mappings, and XLA crashes where it gets none for a program.
MOST_MAPPINGS = 40_000
#: A run that prints its summary has at least so many tests.
MANY = 100


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="slow tests too, and many examples of each property: what make test-all runs",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    tiers.is_all = config.getoption("--all")
    # The quick tier draws the same examples everywhere; the whole one draws others each time.
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(
            random.SystemRandom().randrange(10**6) if tiers.is_all else 0
        )


def pytest_collection_modifyitems(config, items):
    """Leave slow tests out, unless they are asked for by `--all` or by name.

    Files whose programs are optimized come first: between the two kinds jax forgets its programs.
    """
    items.sort(key=lambda item: item.get_closest_marker("optimized") is None)
    if tiers.is_all or any("::" in name for name in config.args):
        return
    left = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_terminal_summary(terminalreporter, config):
    """One block to paste: commit, machine, counts, what was skipped and why, the longest tests."""
    reports = [
        r for found in terminalreporter.stats.values() for r in found if hasattr(r, "duration")
    ]
    seconds = collections.Counter()
    for report in reports:
        seconds[report.nodeid] += report.duration
    if len(seconds) < MANY:
        return
    say = terminalreporter.write_line
    tier = "make test-all" if tiers.is_all else "make test"
    say(f"-- {tier}, commit {commit()}, seed {config.getoption('--hypothesis-seed')}")
    say(f"   {machine()}")
    counts = {k: len(v) for k, v in terminalreporter.stats.items() if k and k != "warnings"}
    took = time.time() - psutil.Process().create_time()
    say(f"   {', '.join(f'{n} {k}' for k, n in counts.items())} in {took / 60:.1f} min")
    reasons = collections.Counter(
        str(r.longrepr[2]) for r in terminalreporter.stats.get("skipped", [])
    )
    for reason, num in reasons.most_common():
        say(f"   {num} {reason.removeprefix('Skipped: ').splitlines()[0]}")
    say("   the thirty longest, in seconds:")
    for name, took in seconds.most_common(30):
        say(f"   {took:6.1f}  {name.removeprefix('tests/')}")


def commit():
    """The commit that is tested, and whether files differ from it."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "?"


def machine():
    """Processor, cores, Python and jax."""
    import jax  # after the settings above

    names = [
        line.split(":", 1)[1].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    return f"{cores} cores of {[*names, '?'][0]}, Python {python}, jax {jax.__version__}"


def let_programs_go():
    """Compiled programs stay until a worker ends: a whole run of the tests would keep thousands."""
    import jax

    from support.inside.jax import trim_heap

    jax.clear_caches()
    gc.collect()
    trim_heap()


@pytest.fixture(scope="module", autouse=True)
def memory_is_bounded():
    yield
    if psutil.Process().memory_info().rss > MOST_BYTES:
        let_programs_go()


@pytest.fixture(autouse=True)
def mappings_are_bounded():
    yield
    with open("/proc/self/maps", "rb") as file:
        if sum(1 for _ in file) > MOST_MAPPINGS:
            let_programs_go()


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled_in_haste(request):
    """Of the quick tier LLVM takes a third; files about what its optimizations may move say so."""
    import jax  # after the settings above

    is_hasty = not (tiers.is_all or request.node.get_closest_marker("optimized"))
    setting = str(int(is_hasty))
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == setting:
        return
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = setting
    jax.config.update("jax_disable_most_optimizations", is_hasty)
    # jax keeps programs by what they compute, and not by how they were compiled.
    jax.clear_caches()


@pytest.fixture
def no_persistent_cache():
    """Programs are compiled in this process, as for a user who has set up no cache."""
    import jax  # after the settings above
    from jax.experimental.compilation_cache import compilation_cache

    jax.clear_caches()
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def every_program_is_cached():
    """The copies of a model run the same programs on other devices, and so do spreads and plans."""
    import jax

    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    yield
    jax.config.update(name, before)
