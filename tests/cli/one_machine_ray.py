"""Ray's command line on a pretended machine: `ray stop` sees only the processes of that machine.

`ray stop` ends every Ray process it can see. On a machine that tests share with other clusters it must see only those
with this machine's mark in their environment, which all processes of an ssh session inherit.
"""

import os

import psutil
from ray.scripts import scripts

MARK = "RAYFED_MACHINE"
every_process = psutil.process_iter


def processes_of(mark):
    """The processes that carry ``mark``."""
    for process in every_process():
        try:
            if process.environ().get(MARK) == mark:
                yield process
        except psutil.Error:
            continue


def of_this_machine(attrs=None, ad_value=None):
    """``psutil.process_iter`` for `ray stop`, less the shells that run it."""
    return iter([p for p in processes_of(os.environ[MARK]) if p.pid != os.getpid()])


if __name__ == "__main__":
    psutil.process_iter = scripts.psutil.process_iter = of_this_machine
    scripts.main()
