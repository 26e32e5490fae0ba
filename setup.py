"""What pyproject.toml cannot say: ``patches/`` is at the top here and inside the package there."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PATCHES = "vllm_thunder.patches"


class BuildPython(build_py):
    """Takes the patches as data, and no script that lies beside them."""

    def find_package_modules(self, package, package_dir):
        return [] if package == PATCHES else super().find_package_modules(package, package_dir)


setup(
    cmdclass={"build_py": BuildPython},
    packages=[*find_packages(include=["vllm_thunder", "vllm_thunder.*"]), PATCHES],
    package_dir={PATCHES: "patches"},
    package_data={"vllm_thunder": ["py.typed"], PATCHES: ["*/*.patch", "*/hashes.json"]},
)
