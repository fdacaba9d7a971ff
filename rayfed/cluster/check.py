"""Checking a cluster file before any machine starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from rayfed.cluster.findings import Finding, warning
from rayfed.cluster.kubernetes import manifest_findings
from rayfed.cluster.launcher import launcher_findings
from rayfed.cluster.placement import asked_for
from rayfed.errors import OptionError


def check_file(path: Path, words: Sequence[str] = ()) -> list[Finding]:
    """Everything wrong or risky with a file of ``ray up`` or manifests for KubeRay, and the run ``words`` ask for.

    Raises:
        OptionError: the file cannot be read or is neither, or the run options are wrong themselves.
    """
    try:
        text = path.read_text(encoding="utf-8")
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}): give the path of a cluster file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    asked = asked_for(text, words)
    if not documents or not all(isinstance(d, dict) for d in documents):
        raise OptionError(f"{path} holds no cluster: it must be a file of `ray up` or Kubernetes manifests.")
    if all(isinstance(d.get("kind"), str) for d in documents):
        found = list(manifest_findings(documents, asked))
    elif len(documents) == 1:
        found = list(launcher_findings(documents[0], asked))
    else:
        raise OptionError(f"{path} mixes documents with and without kind: keep one cluster a file.")
    return found + _placeholders(text)


def _placeholders(text: str) -> list[Finding]:
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    names = sorted(set(re.findall(r"CHANGE_ME_\w+|\b192\.0\.2\.\d+", code)))  # the second: addresses kept for examples
    return [warning(name, "is still to be replaced: see the comments of the file.") for name in names]
