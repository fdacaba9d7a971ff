"""Studies as commands: many runs, one result file per run, so that a study that was stopped goes on where it was.

    python -m benchmarks.studies NAME          run what is missing, print the table
    python -m benchmarks.studies NAME --table  only print the table of what is there

Each study is a module here: the runs it is made of, and the columns of its table. Every run is the command a user would
type, in its own process, one thread each. Result files and tables lie under ``benchmarks/results/NAME``.
"""
