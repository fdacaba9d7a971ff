"""A disk that fills up: a real file system of 20 MB, in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from rayfed.run import main
from tests.engine.runs import FAST, ROOT, assert_same_bits

METHOD = ["method=tests.engine.faulty:Faulty", "engine.pool=local"]
STEPS = """
set -e
mount -t tmpfs -o size=20m tmpfs "$DISK"
head -c {filler} /dev/zero > "$DISK/filler"
set +e
"$@" "out=$DISK/run"
echo "status $?"
find "$DISK/run" -name '*.tmp' | sed 's/^/left over: /'
rm "$DISK/filler"
"$@" "out=$DISK/run" resume=auto
echo "status $?"
cp -r "$DISK/run" "$KEPT"
"""


def test_a_full_disk_leaves_the_last_good_save_and_the_run_goes_on_later(tmp_path):
    """700 KiB are left when the run starts: enough for its first round."""
    whole = tmp_path / "whole"
    assert main([*METHOD, f"out={whole}", *FAST]) == 0
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "rayfed.run", *METHOD, *FAST]
    script = STEPS.format(filler=(20 << 20) - (700 << 10))
    environment = {**os.environ, "DISK": str(disk), "KEPT": str(tmp_path / "kept"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *command],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240, check=False,
    )  # fmt: skip
    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == ["status 1", "status 0"], done
    assert "No space left on device" in done.stderr and "go on with resume=auto" in done.stderr
    assert "the last good save is kept" in done.stderr and "Traceback" not in done.stderr
    assert "left over" not in done.stdout
    assert "resumed after round" in done.stdout
    assert_same_bits(whole, tmp_path / "kept")
