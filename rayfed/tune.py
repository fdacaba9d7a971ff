"""The command ``python -m rayfed.tune space=fedsdg ...``: search hyper-parameters, each trial a federated run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rayfed.run import absolute_paths, in_cluster, in_utf8, output_folder, reserve, told
from rayfed.sweep.request import Request, parse_request

USAGE = """\
usage: python -m rayfed.tune [space=NAME|FILE] [name=value ...] [--help | --list | --dry-run]

  python -m rayfed.tune space=fedsdg
  python -m rayfed.tune space=fedglad tune.samples=32 tune.searcher=optuna tune.scheduler=asha rounds=12 out=DIR
  python -m rayfed.tune method=fedlora 'train.lr=grid(1e-4,1e-3,1e-2)' rounds=5
  python -m rayfed.tune space=fedglad out=DIR resume=auto

  --list     the search spaces that come with rayfed
  --dry-run  what would be searched, and the first points

In place of a value an option takes uniform(low,high), loguniform(low,high), quniform(low,high,step),
randint(low,high), choice(a,b,...) or grid(a,b,...); quote it for the shell. A plain value takes the
option out of the space.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status (0 a valid trial, 1 none, 2 refused, 130 interrupted, 143 terminated)."""
    return told(argv, _command)


def _command(flags: set[str], words: Sequence[str]) -> int:
    if flags & {"--help", "-h"}:
        from rayfed import describe

        print(USAGE + "\n" + describe.tune_help(words))
        return 0
    if "--list" in flags:
        from rayfed import describe

        print(describe.space_listing())
        return 0
    request = parse_request(words)
    request = request.anchored(absolute_paths(request.base))
    out = output_folder(request.base, prefix="sweep-")
    if "--dry-run" in flags:
        from rayfed import describe

        print(describe.dry_sweep(request, out))
        return 0
    return execute(request, out)


def execute(request: Request, out: Path) -> int:
    """Play the sweep on the cluster that ``engine.address``, RAY_ADDRESS or this machine offers."""
    from rayfed.sweep.placement import all_nodes, plan_trial
    from rayfed.sweep.run import Sweep, prepare

    def play() -> int:
        nodes = all_nodes()
        plan = plan_trial(request.base, nodes)
        return Sweep(request, reserve(out, named=request.base.out is not None), nodes, plan).play()

    prepare()
    return in_cluster(request.base, play, needed=True)


def command() -> int:
    """Entry point of the process."""
    in_utf8("rayfed.tune")
    return main()


if __name__ == "__main__":
    sys.exit(command())
