"""Engines that the coordinator's tests share."""

import pytest

from tests.coordinator.program_engine import ProgramEngine


@pytest.fixture
async def engines():
    """Two engines that are up."""
    made = [ProgramEngine(), ProgramEngine()]
    for engine in made:
        await engine.start()
    yield made
    for engine in made:
        if engine.alive:
            await engine.kill()
