"""Packages of the wheel; everything else is in pyproject.toml.

The folder ``configs`` is installed inside ``cirag_jax``, because a top-level package of that name
could collide with a user's folder. `cirag_jax.config_files` finds it in both places.
"""

from setuptools import find_packages, setup

CONFIGS = "cirag_jax._installed.configs"

setup(
    packages=[*find_packages(include=["cirag_jax*"]), CONFIGS, f"{CONFIGS}.methods"],
    package_dir={CONFIGS: "configs"},
)
