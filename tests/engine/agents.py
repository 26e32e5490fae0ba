"""Programs in a closed loop on a :class:`WorkedEngine`: a turn, a tool, the next turn."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.request import Request, RequestStatus

from tests.engine.harness import text
from tests.engine.worker import WorkedEngine, answer


@dataclass
class Agent:
    """One program: ``turns`` still to send, each with a prompt that continues the one before."""

    name: str
    prompt: list[int]
    turns: int
    output: int
    #: Tokens of a tool's result.
    growth: int
    tool_seconds: float = 0.0
    request: Request | None = None
    #: When the next turn is due, or when the last one was sent.
    at: float = 0.0
    started: bool = True
    #: Seconds from each turn's arrival to its first step.
    waits: list[float] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.request is None and not self.turns


class Loop:
    """Runs agents to their ends, two steps outstanding."""

    def __init__(self, engine: WorkedEngine, agents: list[Agent]):
        self.engine = engine
        self.agents = agents
        self.turns = 0
        self.steps = 0

    def run(self, seconds_of: Callable[[int], float], *, most_steps: int) -> None:
        """A step with so many prefill tokens takes ``seconds_of`` them."""
        for agent in self.agents:
            agent.at = self.engine.now
        while not all(agent.over for agent in self.agents):
            assert self.steps < most_steps, "the agents do not come to an end"
            for agent in self.agents:
                self._advance(agent)
            self._step(seconds_of)
            if self.steps % 50 == 0:
                self.engine.check()

    def _advance(self, agent: Agent) -> None:
        now = self.engine.now
        if agent.request is not None and agent.request.is_finished():
            self._turn_is_over(agent, agent.request)
        if agent.request is None and agent.turns and agent.at <= now:
            agent.turns -= 1
            agent.request = self.engine.send(
                agent.prompt, agent.name, max_tokens=agent.output, final=not agent.turns
            )
            agent.at, agent.started = now, False

    def _turn_is_over(self, agent: Agent, request: Request) -> None:
        """It ended as it had to, and its client has the model's text."""
        self.turns += 1
        said = list(request.output_token_ids)
        assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        assert said == answer(agent.prompt, agent.output)
        assert self.engine.received.pop(request.request_id) == said
        agent.prompt = list(request.all_token_ids) + text(7000 + self.turns, agent.growth)
        agent.request = None
        agent.at = self.engine.now + agent.tool_seconds

    def _step(self, seconds_of: Callable[[int], float]) -> None:
        if len(self.engine.outstanding) == 2:
            self.engine.update()
        began = self.engine.now
        scheduled = self.engine.schedule().num_scheduled_tokens
        for agent in self.agents:
            request = agent.request
            if not agent.started and request is not None and request.request_id in scheduled:
                agent.started = True
                agent.waits.append(began - agent.at)
        if not scheduled:
            while self.engine.outstanding:
                self.engine.update()
        self.engine.now += seconds_of(sum(n for n in scheduled.values() if n > 1))
        self.steps += 1
