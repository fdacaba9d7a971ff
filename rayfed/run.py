"""The command ``python -m rayfed.run method=fedglad ...``: one federated experiment, from options to results."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rayfed import config
from rayfed.conf.options import RunOptions
from rayfed.errors import OptionError, RayfedError

log = logging.getLogger("rayfed")
USAGE = """\
usage: python -m rayfed.run [name=value ...] [config=FILE] [--help | --list | --dry-run]

  python -m rayfed.run method=fedglad
  python -m rayfed.run method=fedlora data=fashion_mnist clients.n=20 partition.alpha=0.1 rounds=10 out=DIR
  python -m rayfed.run config=DIR/config.yaml seed=1 out=DIR2

  --list     methods, data sets and backbones
  --dry-run  the resolved options, what would run, and the bytes per round
"""
FLAGS = {"--help", "-h", "--list", "--dry-run"}
TERMINATED = 143
"""Exit status after SIGTERM."""
RUN_MARKS = ("checkpoints", "summary.json", "sweep.json")
"""What a results folder holds once something was run in it."""
JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it in a submitted job, whose working directory is a copy that is removed later."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status (0 done, 1 failed, 2 refused, 130 interrupted, 143 terminated)."""
    return told(argv, _command)


def told(argv: Sequence[str] | None, command: Callable[[set[str], Sequence[str]], int]) -> int:
    """Run ``command`` on the flags and the other words of ``argv``; tell errors in sentences and by the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = {word for word in words if word.startswith("-")}
    words = [word for word in words if word not in flags]
    _replace_what_cannot_be_printed()
    try:
        if spare := flags - FLAGS:
            raise OptionError(f"{sorted(spare)[0]} is not a flag: use --help, --list, --dry-run, or name=value.")
        return command(flags, words)
    except RayfedError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; finished rounds are saved (go on with resume=auto)", file=sys.stderr)
        return 130


def _command(flags: set[str], words: Sequence[str]) -> int:
    if flags & {"--help", "-h"}:
        from rayfed import describe

        print(USAGE + "\n" + describe.option_help(words))
        return 0
    if "--list" in flags:
        from rayfed import describe

        print(describe.listing())
        return 0
    options = absolute_paths(config.parse_options(words))
    out = output_folder(options)
    if "--dry-run" in flags:
        from rayfed import describe

        print(describe.dry_run(options, out))
        return 0
    return execute(options, out)


def _base() -> Path:
    """What relative output paths are relative to: this folder, or in a submitted job one that outlives it."""
    if JOB_MARK in os.environ:
        return Path(os.environ.get("RAYFED_HOME", Path.home() / "rayfed"))
    return Path.cwd()


def absolute_paths(options: RunOptions) -> RunOptions:
    """Return the options with paths that other processes open made absolute."""
    changes: dict[str, Any] = {}
    if options.backbone.checkpoint is not None:
        path = Path(options.backbone.checkpoint).expanduser().resolve()
        if not path.is_file():
            raise OptionError(f"backbone.checkpoint={path} is no file: check the path, or leave it out.")
        changes["backbone"] = options.backbone.model_copy(update={"checkpoint": str(path)})
    if options.engine.cache_dir is not None:
        folder = Path(options.engine.cache_dir).expanduser().resolve()
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise OptionError(
                f"engine.cache_dir={folder} is no folder that can be written: create it, or leave it out."
            )
        changes["engine"] = options.engine.model_copy(update={"cache_dir": str(folder)})
    uri = options.tracking.uri or ""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        path = _base() / uri.removeprefix("sqlite:///")
        changes["tracking"] = options.tracking.model_copy(update={"uri": f"sqlite:///{path}"})
    return options.model_copy(update=changes)


def output_folder(options: RunOptions, *, prefix: str = "") -> Path:
    """Return the absolute results folder; inside a submitted job it is never in the job's temporary copy.

    Raises:
        OptionError: it holds a run already and ``resume`` is not asked for, or cannot be written.
    """
    if options.resume == "auto" and options.out is None:
        raise OptionError("resume=auto needs out=DIR, the folder of the run to go on with.")
    base = _base()
    name = (
        options.out
        or f"outputs/{prefix}{options.method.name}-{options.data.name}-s{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    out = (base / Path(name).expanduser()).resolve()
    if out.exists() and not out.is_dir():
        raise OptionError(f"out={out} is a file: name a folder.")
    used = [n for n in RUN_MARKS if (out / n).exists()]
    if used and options.resume == "never":
        raise OptionError(f"out={out} already holds a run: add resume=auto to go on with it, or choose another folder.")
    nearest = next(p for p in (out, *out.parents) if p.exists())
    if not nearest.is_dir():
        raise OptionError(f"out={out} lies in {nearest}, which is a file: choose another folder.")
    if "?" in str(out) and options.tracking.enabled and options.tracking.uri is None:
        raise OptionError(f"out={out} has a ? in it, which a database address cannot carry: choose a name without it.")
    if not os.access(nearest, os.W_OK):
        raise OptionError(f"out={out} cannot be written ({nearest} is read-only for this user): choose another folder.")
    return out


def reserve(out: Path, *, named: bool) -> Path:
    """Create the results folder; a name made from the time gets a number if another run was as quick to choose it."""
    number = 1
    while True:
        folder = out if number == 1 else out.with_name(f"{out.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=named)
            return folder
        except FileExistsError:
            number += 1


def execute(options: RunOptions, out: Path) -> int:
    """Run the experiment that ``options`` describe; results go to ``out``."""
    started = time.perf_counter()
    return in_cluster(options, lambda: _play(options, out, started), needed=options.engine.pool == "ray")


def in_cluster(options: RunOptions, play: Callable[[], int], *, needed: bool) -> int:
    """Call ``play`` with Ray joined where it is ``needed``, and with SIGTERM as an orderly end."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    previous, connected = signal.getsignal(signal.SIGTERM), False
    received: list[int] = []

    def terminate(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        raise SystemExit(TERMINATED)

    try:
        if needed:
            from rayfed.engine.resources import connect

            connected = connect(options)
        signal.signal(signal.SIGTERM, terminate)  # after connecting: Ray installs a handler of its own
        return play()
    except SystemExit as stop:  # while it waits, Ray turns any exit status into 1
        raise SystemExit(TERMINATED if received else stop.code) from None
    finally:
        if connected:
            import ray

            ray.shutdown()
        signal.signal(signal.SIGTERM, previous)


def _play(options: RunOptions, out: Path, started: float) -> int:
    """Play the experiment in the joined cluster, or in this process."""
    from rayfed.engine import heap

    heap.load_torch()
    from rayfed.data import build_task_from_options
    from rayfed.engine.resources import plan_here

    plan = plan_here(options)
    if plan.note:
        print(f"note: {plan.note}")
    from rayfed.experiment import Experiment
    from rayfed.tracking.console import Console

    task = build_task_from_options(options)
    out = reserve(out, named=options.out is not None)
    with Console(options.rounds) as console:
        experiment = Experiment(options, out, task, console, functools.partial(plan_here, options), started=started)
        gc.freeze()  # what is here stays: looking through it would stop the driver for 0.1 s in the middle of a round
        experiment.play()
    experiment.observers.print_result()
    return 0


def _replace_what_cannot_be_printed() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def command() -> int:
    """Entry point of the process: as ``main``, in Python's UTF-8 mode whatever the locale."""
    in_utf8("rayfed.run")
    return main()


def in_utf8(module: str) -> None:
    """Start ``python -m module`` again in UTF-8 mode, unless that is the mode.

    Under a locale such as C, file names with other letters would otherwise be neither readable nor writable as text.
    """
    if sys.getfilesystemencoding().lower() not in {"utf-8", "utf8"}:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(command())
