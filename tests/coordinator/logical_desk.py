"""A stock engine's books and their reader, for tests."""

from vllm_thunder.coordinator.logical.engine import LogicalEngine
from vllm_thunder.program.config import ThunderConfig
from vllm_thunder.program.turn import Turn

BLOCK = 16


class Desk:
    """A stock engine of 100 blocks, and a reader who knows only its reports."""

    def __init__(self, blocks=100, seats=None, keeps_prefixes=True, **settings):
        self.now = 0.0
        self.engine = LogicalEngine(
            ThunderConfig(**settings),
            capacity_blocks=blocks,
            block_size=BLOCK,
            seats=seats,
            keeps_prefixes=keeps_prefixes,
        )
        self.known = {}
        self.memory = None
        self.sent = 0

    def send(self, program, blocks, **turn):
        self.sent += 1
        turn = Turn(program, f"t{self.sent}", **turn)
        self.engine.turn_sent(turn, blocks * BLOCK, self.now)
        return turn.turn_id

    def run(self, program, blocks, seconds=0.0, output=1, **turn):
        """A whole turn that leaves a context of ``blocks`` blocks and ``output`` tokens."""
        turn_id = self.send(program, blocks, **turn)
        self.now += seconds
        self.engine.first_byte(turn_id, self.now)
        self.engine.turn_ended(turn_id, blocks * BLOCK + output, self.now)

    def report(self):
        """What has changed, by program; None: gone."""
        changed = {}
        while True:
            report = self.engine.report(self.now)
            if report.reset:
                self.known.clear()
            for told in report.programs:
                assert told.program_id not in report.gone
                self.known[told.program_id] = changed[told.program_id] = told
            for gone in report.gone:
                self.known.pop(gone, None)
                changed[gone] = None
            self.memory = report.memory
            if report.complete:
                self.engine.check_integrity()
                return changed
