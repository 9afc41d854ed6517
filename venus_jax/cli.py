"""What every command shares: how its errors end, its progress bar, and the memory it has used."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import Callable, Iterator

from absl import app

from venus_jax.errors import VenusError

_HELP = {"--help", "-help", "--helpshort", "--helpfull", "-?"}


def run(main: Callable[[list[str]], int | None]) -> None:
    """Runs a command: parses its flags, calls `main(argv)` and exits.

    Exit status: what `main` returns, 0 for None and after --help; 1 for wrong flags or arguments, with their
    description (as absl does); 2 for a `VenusError`, whose message is the only line on stderr; 130 after Ctrl-C.
    """
    def guarded(argv: list[str]) -> int | None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected argument {argv[1]!r}; values are given as --flag=value")
        try:
            return main(argv)
        except VenusError as e:
            _end(str(e), 2)
        except KeyboardInterrupt:
            _end("interrupted", 130)

    try:
        app.run(guarded)
    except SystemExit as e:  # absl takes a call for help for a failure
        sys.exit(0 if e.code == 1 and _HELP & set(sys.argv) else e.code)


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar in bytes, on a terminal only; gives a function of (bytes since the last call, bytes in all)."""
    from tqdm import tqdm

    with tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
        def update(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        yield update


def compilation_cache() -> None:
    """Keeps compiled programs for the next run: in `$JAX_COMPILATION_CACHE_DIR`, else in the user's cache folder."""
    import jax

    if not jax.config.jax_compilation_cache_dir:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(home, "venus_jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def peak_memory() -> int:
    """The most bytes this process has had in memory at once."""
    with contextlib.suppress(OSError):  # Linux; getrusage there counts what the process that started us had, too
        with open("/proc/self/status", encoding="ascii") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _end(message: str, status: int) -> None:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)  # names in it may hold line breaks
    print(f"{os.path.basename(sys.argv[0])}: {line}", file=sys.stderr)
    sys.exit(status)
