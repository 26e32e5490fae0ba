"""Nobody waits for ever, whatever else the engine is full of."""

from tests.engine.harness import BLOCK, text

STEP = 0.05


class Crowd:
    """Programs that send their next turn as soon as the last one has ended."""

    def __init__(self, engine, programs, blocks, overlapping=1, output=20):
        self.engine = engine
        self.output = output
        self.prompts = {f"crowd{n}": text(100 + n, blocks * BLOCK) for n in range(programs)}
        self.turns = {name: [] for name in self.prompts}
        self.overlapping = overlapping
        self.ended = 0

    def step(self):
        for number, (name, prompt) in enumerate(self.prompts.items()):
            going = [turn for turn in self.turns[name] if not turn.is_finished()]
            self.ended += len(self.turns[name]) - len(going)
            if len(going) < self.overlapping and self.engine.steps >= 2 * number:
                tokens = self.output + 3 * number  # they do not end together
                going.append(self.engine.send(prompt, name, max_tokens=tokens))
            self.turns[name] = going
        self.engine.step(STEP)
        self.engine.steps += 1

    def wait_for(self, request, seconds):
        """Until the request has ended, within so many seconds."""
        end = self.engine.now + seconds
        while not request.is_finished():
            assert self.engine.now < end, self.engine.scheduler.status.summary()
            self.step()


def crowded(make_engine, *, pool, programs, blocks, overlapping=1, output=20, **settings):
    engine = make_engine(blocks=pool, max_wait=4.0, **settings)
    engine.steps = 0
    crowd = Crowd(engine, programs, blocks, overlapping, output)
    for _ in range(60):
        crowd.step()
    return engine, crowd


def test_a_backlog_of_unlabelled_requests_starves_no_turn(make_engine):
    """More requests than seats, at every moment."""
    engine = make_engine(blocks=400, max_num_seqs=4, max_wait=4.0)
    sent = 0

    def step():
        nonlocal sent
        while sum(engine.scheduler.get_request_counts()) < 8:
            sent += 1
            engine.send(text(1000 + sent, 40), max_tokens=8)
        engine.step(STEP)

    for _ in range(10):
        step()
    request = engine.send(text(1, 3 * BLOCK), "p", max_tokens=4)
    arrived = engine.now
    while not request.is_finished():
        step()
        assert engine.now - arrived < 4.0


def test_parallel_turns_of_one_program_take_no_seat_for_ever(make_engine):
    engine, crowd = crowded(
        make_engine, programs=1, blocks=4, overlapping=6, pool=400, max_num_seqs=4
    )
    request = engine.send(text(1, 3 * BLOCK), "p", max_tokens=4)
    crowd.wait_for(request, 6.0)


def test_a_large_prompt_that_is_due_is_yielded_to_by_programs_that_hardly_act(make_engine):
    """Their turns use nearly all blocks at nearly all times: waiting for a gap is in vain."""
    engine, crowd = crowded(make_engine, programs=9, blocks=8, pool=100)
    request = engine.send(text(1, 40 * BLOCK), "large", max_tokens=4)
    crowd.wait_for(request, 6.0)
    before = crowd.ended
    for _ in range(200):
        crowd.step()
    assert crowd.ended > before + 30


def test_a_program_whose_turns_overlap_yields_too(make_engine):
    engine, crowd = crowded(make_engine, programs=1, blocks=40, overlapping=2, pool=64)
    request = engine.send(text(1, 30 * BLOCK), "p", max_tokens=4)
    crowd.wait_for(request, 6.0)
    before = crowd.ended
    for _ in range(200):
        crowd.step()
    assert crowd.ended > before + 5


def test_the_siblings_of_a_large_turn_do_not_wait_for_memory_of_their_own(make_engine):
    """n = 2 with a prompt of more than half of the memory, and somebody always runs beside it."""
    engine = make_engine(blocks=100, max_num_batched_tokens=4 * BLOCK)
    prompt = text(1, 60 * BLOCK)
    guest = engine.send(text(2, 40), max_tokens=2000)
    engine.step(STEP)
    fan = [engine.send(prompt, "p", turn_id="fan", max_tokens=4) for _ in range(2)]
    arrived = engine.now
    while not all(request.is_finished() for request in fan):
        assert engine.now - arrived < 5.0
        engine.step(STEP)
    engine.abort(guest)


def test_silent_sessions_take_a_seat_each_and_are_no_work(make_engine):
    engine = make_engine(blocks=64, max_num_seqs=4, idle_grace=0.25)
    sessions = [engine.send(text(n, 40), f"s{n}", request={"resumable": True}) for n in range(2)]
    for _ in range(4):
        engine.step(STEP)
    memory = engine.scheduler.memory()
    assert memory.free_slots == 2
    assert not memory.busy
    request = engine.send(text(9, 3 * BLOCK), "p", max_tokens=2)
    engine.run(request, steps=20)
    engine.abort(*sessions)


def test_the_engine_sleeps_beside_a_silent_session(make_engine):
    engine = make_engine(blocks=64)
    session = engine.send(text(1, 40), "s", request={"resumable": True})
    for _ in range(4):
        engine.step(STEP)
    engine.turn(text(2, 50 * BLOCK), "acting")
    request = engine.send(text(3, 30 * BLOCK), "p")
    engine.step()
    assert request.request_id in engine.scheduler._held
    engine.step()  # reports who finished
    assert engine.scheduler.held_wait() > 0.0
    engine.now = engine.scheduler.program_policy.deadline
    engine.run(request)
    engine.abort(session)
