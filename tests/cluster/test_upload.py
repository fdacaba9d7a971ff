"""What a job would upload: counted by Ray's own rules, named by folder."""

from __future__ import annotations

from pathlib import Path

from rayfed.cluster.__main__ import main
from rayfed.cluster.upload import upload_sizes

ROOT = Path(__file__).parents[2]


def test_checkout_is_small():
    assert upload_sizes(ROOT)[""] < 20 * 2**20


def test_largest_folders_are_named_with_how_to_leave_them_out(tmp_path, capsys, monkeypatch):
    for name, size in {"data/é β/x.png": 30, "runs/old": 2, ".git/pack": 50, "ignored/y": 40, "a/skip/z": 25}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size << 20))
    (tmp_path / ".gitignore").write_text("/ignored/\n")
    (tmp_path / "a" / ".rayignore").write_text("skip/\n")  # counts from its own folder on
    sizes = upload_sizes(tmp_path)
    assert sizes["data/"] == sizes["data/é β/"] == 30 << 20
    assert not [name for name in sizes if name.startswith((".git/", "ignored", "a/skip"))]
    assert main(["upload-size", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "32.0 MiB to upload" in said and "30.0 MiB  data/\n" in said and "2.0 MiB  runs/\n" in said
    assert f"{tmp_path / '.rayignore'}" in said and "/data/" in said
    (tmp_path / ".rayignore").write_text("/data/\n")
    assert upload_sizes(tmp_path)[""] < 3 << 20
    monkeypatch.setattr("ray._private.runtime_env.packaging.GCS_STORAGE_MAX_SIZE", 1 << 20)
    assert main(["upload-size", str(tmp_path)]) == 2, "Ray would not take it"


def test_count_is_what_ray_packs(tmp_path):
    """The package that Ray would send holds exactly the files counted."""
    import zipfile

    from ray._private import ray_constants
    from ray._private.runtime_env.packaging import create_package

    for name in ("a.py", "sub/b.py", "sub/deep/er/c.bin", ".venv/lib", "__pycache__/x.pyc", "left/out"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(b"x" * 1000)
    (tmp_path / "tree" / ".rayignore").write_text("left/\n")
    create_package(
        str(tmp_path / "tree"),
        tmp_path / "package.zip",
        include_gitignore=True,
        excludes=ray_constants.get_runtime_env_default_excludes(),
    )
    with zipfile.ZipFile(tmp_path / "package.zip") as package:
        packed = sum(info.file_size for info in package.infolist())
    assert upload_sizes(tmp_path / "tree")[""] == packed == 3000 + len("left/\n")
