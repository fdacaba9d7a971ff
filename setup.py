"""The search spaces lie beside the package in a checkout and inside it where installed; the rest is in pyproject."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["rayfed*"]), "rayfed.tune_spaces"],
    package_dir={"rayfed.tune_spaces": "tune_spaces"},
)
