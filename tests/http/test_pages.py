"""Pages of programs, from the tables of the engine cores."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.http.driver import FakeCore
from vllm_thunder.engine.client import EnginePrograms
from vllm_thunder.engine.status import EngineStatus
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.table import ProgramTable
from vllm_thunder.program.turn import Turn


class TablesCore(FakeCore):
    """Engine cores that have nothing but a table."""

    def __init__(self, ranks: int):
        super().__init__()
        self.tables = [ProgramTable(ThunderConfig()) for _ in range(ranks)]

    def add(self, program_id: str, rank: int) -> None:
        program = self.tables[rank].turn_arrived(Turn(program_id, "t"), 10, 0.0)
        self.tables[rank].request_ended(program, "t", 0.0)

    def release(self, program_id: str) -> None:
        for table in self.tables:
            if (program := table.get(program_id)) is not None:
                table.release(program)

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        assert (method, args[0]) == ("programs", "list")
        nothing = SimpleNamespace()
        return [
            EngineStatus(table, nothing, nothing, clock=lambda: 1.0, memory=lambda: nothing).list(
                *args[1:]
            )
            for table in self.tables
        ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 3, 7, 100])
async def test_pages_hold_every_program_while_others_go(ranks: int, limit: int) -> None:
    core = TablesCore(ranks)
    names = [f"{number * 7 % 50:02}" for number in range(50)]  # not in the order of their ids
    for number, name in enumerate(names):
        for rank in {number % ranks, number // ranks % ranks}:
            core.add(name, rank)
    programs = EnginePrograms(SimpleNamespace(engine_core=core))
    listed, after = [], ""
    while after is not None:
        page, after = await programs.page(after, limit)
        listed += [program["program_id"] for program in page]
        if after is not None:
            core.release(after)  # the program that the next page begins after is gone
    assert sorted(listed) == sorted(names)
