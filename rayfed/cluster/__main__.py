"""The command ``python -m rayfed.cluster``: look at a cluster file, or at an upload, before it costs anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rayfed.errors import OptionError, RayfedError, ResourceError

USAGE = """\
usage: python -m rayfed.cluster check FILE [name=value ...]
       python -m rayfed.cluster upload-size [FOLDER]

  check        what is wrong with a file of `ray up` or with manifests for KubeRay, by field, before a machine starts;
               name=value are the run's options (or a line `# rayfed: name=value ...` in the file), so that it can
               say whether the nodes can hold the run
  upload-size  what `ray job submit --working-dir FOLDER` would send, and its largest folders

Exit status: 0 fine (perhaps with warnings), 2 refused.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status (0 fine, 2 refused)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(words)
    except RayfedError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return error.exit_code


def _command(words: Sequence[str]) -> int:
    if not words or {"--help", "-h"} & set(words):
        print(USAGE, end="")
        return 0
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ResourceError(
            f"{sys.executable} has no Ray, whose rules are checked: pip install 'ray[default]'."
        ) from error
    command, *rest = words
    if command == "check" and rest:
        return _check(Path(rest[0]), rest[1:])
    if command == "upload-size" and len(rest) <= 1:
        from rayfed.cluster.upload import upload_report

        report, taken = upload_report(Path(rest[0] if rest else "."))
        print(report)
        return 0 if taken else 2
    raise OptionError(f"{' '.join(words)!r} is not a command: use check FILE [name=value ...] or upload-size [FOLDER].")


def _check(file: Path, words: Sequence[str]) -> int:
    from rayfed.cluster.check import check_file

    findings = check_file(file, words)
    for finding in findings:
        print(finding, file=sys.stderr)
    refused = sum(finding.refused for finding in findings)
    print(f"{file}: {f'refused, {refused} to change' if refused else 'fine'}, {len(findings) - refused} warnings")
    return 2 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
