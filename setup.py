"""Packages of the wheel; everything else stands in pyproject.toml.

The folder ``configs`` goes inside ``cirag_jax``: as a package of its own it would collide with a
user's folder of that name. `cirag_jax.config_files` finds it in both places.
"""

from setuptools import find_packages, setup

CONFIGS = "cirag_jax._installed.configs"

setup(
    packages=[*find_packages(include=["cirag_jax*"]), CONFIGS, f"{CONFIGS}.methods"],
    package_dir={CONFIGS: "configs"},
)
