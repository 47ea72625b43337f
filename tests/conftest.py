"""Settings that every test shares: eight fake devices, and programs compiled once for all."""

import collections
import gc
import os
import pathlib
import subprocess
import tempfile
import time
import zlib

import hypothesis
import psutil
import pytest

# Children of the tests keep what Python makes of hxla's sources too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# Workers and the processes that tests start share what they compiled, from run to run.
_CACHE = pathlib.Path(tempfile.gettempdir()) / f"hxla-tests-{os.getuid()}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _share_entries_of_all_devices():
    """What one device of the CPU compiled serves the others, as jax's cache does it for GPUs.

    Else the copies of a model, which run the same programs on other devices, each compile them.
    """
    from jax._src import cache_key  # after the settings above

    hashed = cache_key._hash_serialized_compile_options

    def stripped(hash_obj, options, strip_device_assignment=False):
        return hashed(hash_obj, options, strip_device_assignment=True)

    cache_key._hash_serialized_compile_options = stripped


_share_entries_of_all_devices()

# However slow or busy a machine is, no example takes too long.
hypothesis.settings.register_profile(
    "any pace", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any pace")

#: Of a worker: two of them, and a job that is larger than its devices, have to fit on one machine.
MOST_BYTES = 3 << 30


# Workers have it from the process that starts them.
os.environ.setdefault("TEST_BEGAN", str(time.time()))


def pytest_runtest_setup(item):
    """Once the minutes of `TEST_MINUTES` are spent, slow tests are left out, aloud.

    All are once a quarter more of them is.
    """
    most = float(os.environ.get("TEST_MINUTES", "0"))
    minutes = (time.time() - float(os.environ["TEST_BEGAN"])) / 60
    is_late = minutes > most * (1 if item.get_closest_marker("slow") else 1.25)
    if most and is_late:
        pytest.skip(f"the {most:g} minutes of TEST_MINUTES are spent: run it by itself")


def pytest_collection_modifyitems(config, items):
    """Of tests with the mark `thinned` each n-th set of parameters, of slow ones this run's part.

    But those that were named.
    """
    if int(os.environ.get("TEST_SETS", "1")) > 1 or any("[" in name for name in config.args):
        return
    num, turn = slow_part()
    seen, kept, left = collections.Counter(), [], []
    for item in items:
        mark, slow = item.get_closest_marker("thinned"), item.get_closest_marker("slow")
        name = item.nodeid.partition("[")[0]
        is_thin = mark and seen[name] % mark.args[0]
        is_later = slow and zlib.crc32(item.nodeid.encode()) % num != turn
        (left if is_thin or is_later else kept).append(item)
        seen[name] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def slow_part():
    """In how many parts slow tests are run, `TEST_PARTS`, and which is this commit's."""
    num = int(os.environ.get("TEST_PARTS", "1"))
    if num == 1:
        return 1, 0
    asked = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout or "0"
    return num, int(commit, 16) % num


def pytest_terminal_summary(terminalreporter):
    num, turn = slow_part()
    if num > 1:
        terminalreporter.write_line(f"slow tests: part {turn + 1} of {num}, this commit's")


@pytest.fixture(scope="module", autouse=True)
def programs_are_let_go():
    """Compiled programs stay until a worker ends: a whole run of the tests would keep thousands."""
    yield
    if psutil.Process().memory_info().rss > MOST_BYTES:
        import jax

        from hxla._jax._heap import trim_heap

        jax.clear_caches()
        gc.collect()
        trim_heap()


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
