import functools
from pathlib import Path

import pytest

from tests.engine.harness import Engine
from vllm_thunder.replay.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_engine(tiny_model):
    """Builds :class:`Engine`; every engine is checked for integrity at the end of the test."""
    engines = []

    @functools.wraps(Engine.__init__)
    def make(**kwargs) -> Engine:
        engines.append(Engine(tiny_model, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        if hasattr(engine.scheduler, "check_integrity"):
            engine.check()
