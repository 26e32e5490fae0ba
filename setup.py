"""What pyproject.toml cannot say: some data is at the top here and inside the package there."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PATCHES = "vllm_thunder.patches"
TRACES = "vllm_thunder.traces"


class BuildPython(build_py):
    """Takes patches and traces as data, and no script that lies beside them."""

    def find_package_modules(self, package, package_dir):
        return (
            []
            if package in (PATCHES, TRACES)
            else super().find_package_modules(package, package_dir)
        )


setup(
    cmdclass={"build_py": BuildPython},
    packages=[*find_packages(include=["vllm_thunder", "vllm_thunder.*"]), PATCHES, TRACES],
    package_dir={PATCHES: "patches", TRACES: "benchmarks/traces"},
    package_data={
        "vllm_thunder": ["py.typed"],
        PATCHES: ["*/*.patch", "*/hashes.json"],
        TRACES: ["*.jsonl", "README.md"],
    },
)
