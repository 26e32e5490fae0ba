"""A client that follows an engine by its reports, as a coordinator does."""

from concurrent.futures import Future
from typing import Any

import msgspec

from tests.engine.harness import BLOCK, Engine, text
from vllm_thunder.program.program import Program, Status
from vllm_thunder.program.report import EngineReport, ProgramReport


def acting(engine: Engine, count: int, blocks: int) -> None:
    """Programs called acting0, acting1, ... have had a turn with so many blocks."""
    for number in range(count):
        engine.turn(text(100 + number, blocks * BLOCK - 4), f"acting{number}")


def described(program: Program) -> ProgramReport:
    """What a report must say of a program now."""
    return ProgramReport(
        program_id=program.program_id,
        context_tokens=program.context_tokens,
        resident_blocks=program.resident_blocks,
        claimed=program.status is Status.ACTIVE,
        turns_in_flight=len(program.turns),
        prompt_tokens=program.context_prompt_tokens,
    )


class Follower:
    """``programs`` is what it knows; ``reports`` all that it was told, the oldest first."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.cursor = ""
        self.programs: dict[str, ProgramReport] = {}
        self.reports: list[EngineReport] = []
        self.watch: Future[bytes] | None = None

    @property
    def last(self) -> EngineReport:
        return self.reports[-1]

    def ask(self, wait: float = 0.0) -> bool:
        """One question; True if the answer came at once, else ``watch`` is open."""
        answer = self.engine.scheduler.programs("changes", self.cursor, str(wait))
        if isinstance(answer, Future):
            assert not answer.done()
            self.watch = answer
            return False
        self._apply(answer)
        return True

    def told(self) -> bool:
        """Whether the open question has been answered; then the answer is applied."""
        if self.watch is None or not self.watch.done():
            return False
        answer, self.watch = self.watch.result(timeout=0), None
        self._apply(answer)
        return True

    def catch_up(self) -> None:
        """Ask until nothing is left to be told."""
        self.watch = None  # a client that went away leaves its question open
        for _ in range(1000):
            assert self.ask()
            if self.last.complete:
                return
        raise AssertionError("the reports never end")

    def wait_for(self, seconds: float = 30.0) -> None:
        """Catch up, and wait for what comes."""
        self.catch_up()
        assert not self.ask(seconds)

    def check(self) -> None:
        """It knows exactly the programs of the engine; residency of those that run may lag."""
        table: Any = self.engine.scheduler.table
        assert self.programs.keys() == {p.program_id for p in table}
        for program in table:
            known, true = self.programs[program.program_id], described(program)
            if program.in_flight:
                known = msgspec.structs.replace(known, resident_blocks=true.resident_blocks)
            assert known == true

    def _apply(self, answer: bytes) -> None:
        report = msgspec.json.decode(answer, type=EngineReport)
        self.reports.append(report)
        self.cursor = report.cursor
        if report.reset:
            self.programs.clear()
        for program in report.programs:
            self.programs[program.program_id] = program
        for program_id in report.gone:
            self.programs.pop(program_id, None)
