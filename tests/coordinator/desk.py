"""A fleet whose engines say what a test says."""

from vllm_thunder.coordinator.config import CoordinatorConfig
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.fleet import Fleet
from vllm_thunder.program.report import EngineReport, MemoryReport, ProgramReport
from vllm_thunder.program.turn import Turn

BLOCK = 16


class Desk:
    """A fleet whose engines say what the test says."""

    def __init__(self, rooms, seats=64, **settings):
        self.now = 0.0
        self.fleet = Fleet(CoordinatorConfig(**settings))
        self.sent = 0
        self.memory = {}
        for number, room in enumerate(rooms):
            backend = Backend(f"e{number}")
            self.fleet.joined(backend)
            self.report(f"e{number}", room, seats)

    def busy(self):
        """All engines serve something that is not a program's."""
        for backend in self.fleet.backends.values():
            backend.unlabelled += 1

    def report(self, name, room, seats=64):
        """An engine that prefills 1,000 tokens a second."""
        self.memory[name] = MemoryReport(1000, room, seats, [(BLOCK, None)], 0.001)
        self.say(name)

    def told(self, name, program, blocks, resident=0, claimed=False, turns=0):
        self.say(name, ProgramReport(program, blocks * BLOCK, resident, claimed, turns))

    def say(self, name, *programs, gone=(), reset=False, complete=True):
        report = EngineReport("c", reset, complete, self.memory[name], list(programs), list(gone))
        self.fleet.reported(self.fleet.backends[name], report, self.now)

    def send(self, program, blocks, cached=None, body_bytes=0, **turn):
        self.sent += 1
        turn = Turn(program, f"t{self.sent}", **turn)
        return self.fleet.arrived(turn, blocks * BLOCK, cached or {}, self.now, body_bytes)

    def decide(self):
        """Where which programs went, in order."""
        sent = self.fleet.reconcile(self.now)
        self.fleet.check_integrity()
        return [(d.program.program_id, d.backend.backend_id) for d in sent]

    def end(self, program):
        tracked = self.fleet.get(program)
        for turn_id in list(tracked.running):
            self.fleet.ended(tracked, turn_id, self.now)
