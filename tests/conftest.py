"""What every test runs under: eight simulated CPU devices, exact float32 products, and no network."""

import ipaddress
import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports JAX, and inherited by the commands that tests start.
os.environ.update(
    JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8", JAX_DEFAULT_MATMUL_PRECISION="highest",
    XLA_FLAGS="--xla_backend_optimization_level=0",  # compiling is most of the time, and this takes a third of it away
    PYTHONPATH=str(ROOT))  # this checkout is tested, whichever is installed

import jax
import pytest
from absl import flags

SHARED = ROOT.parent / "shared"

# A second run takes its compiled programs from the first: the same bits, a fifth of the time.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_addoption(parser):
    parser.addoption("--slow", "--run-slow", action="store_true", dest="slow", help="also run the tests marked slow")


def pytest_configure(config):
    if (jax.default_backend(), jax.device_count()) != ("cpu", 8):
        raise pytest.UsageError(f"the tests need 8 simulated CPU devices, JAX has {jax.devices()}; "
                                "something imported JAX before tests/conftest.py could set it up")
    flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags, which pytest never parses


def pytest_collection_modifyitems(config, items):
    if config.option.slow or config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


def _refuse_unless_loopback(host) -> None:
    try:
        allowed = ipaddress.ip_address(host).is_loopback
    except ValueError:
        allowed = host in ("localhost", "", None)
    if not allowed:
        pytest.fail(f"a test reached for the network: {host}")  # no Exception, so that no retry loop swallows it


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Tests must pass on a machine without a network: only Unix sockets and this machine's own addresses work."""
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def checked(method):
        def call(self, address):
            if self.family in (socket.AF_INET, socket.AF_INET6):
                _refuse_unless_loopback(address[0])
            return method(self, address)
        return call

    def checked_getaddrinfo(host, *args, **kwargs):
        _refuse_unless_loopback(host)
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", checked(connect))
        patch.setattr(socket.socket, "connect_ex", checked(connect_ex))
        patch.setattr(socket, "getaddrinfo", checked_getaddrinfo)
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    """Recorded numbers of the reference implementation that come with the tests."""
    return ROOT / "tests" / "golden"


def _shared(folder: str) -> Path:
    path = SHARED / folder
    if not path.is_dir():
        pytest.skip(f"needs {folder} in a folder named shared beside the checkout")
    return path


@pytest.fixture(scope="session")
def official_tokenizer() -> Path:
    """The 9B's own tokenizer files, too large to come with the tests."""
    return _shared("tokenizer")


@pytest.fixture(scope="session")
def shared_golden() -> Path:
    """The whole set of recorded numbers, of which `golden` is a part."""
    return _shared("golden/public")
