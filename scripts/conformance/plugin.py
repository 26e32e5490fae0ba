"""A pytest plugin that puts our scheduler and block pool in place of vLLM's, and records results.

Loaded with ``-p`` into a run of vLLM's tests. Nothing in those tests is changed: the constructors
of vLLM's own classes give ours. A test that makes an object without its constructor, as a bare
namespace for one method, keeps vLLM's class.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from inspect import isfunction
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest


class Substitution:
    """Replaces constructors for the whole run; ``built`` is what the current test made of ours.

    ``tests``: the folder of the tests, as it begins the names of their code's files.
    """

    def __init__(self, tests: str) -> None:
        self.built: list[Any] = []
        self._tests = tests

    def put_async_in_place(self) -> None:
        """vLLM's asynchronous scheduler where a test builds the synchronous one."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        _replace_constructor(Scheduler, {Scheduler: AsyncScheduler})

    def put_ours_in_place(self, *, synchronous: bool, policy: str) -> None:
        """Our scheduler, KV-cache manager and block pool wherever a test builds vLLM's."""
        import vllm_thunder  # noqa: F401  patches vLLM, so it comes before all imports of it

        # isort: split
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        from vllm_thunder.engine.block_pool import ProgramBlockPool, ProgramKVCacheManager
        from vllm_thunder.engine.scheduler import ProgramScheduler
        from vllm_thunder.program.config import CONFIG_KEY

        def set_policy(vllm_config: Any) -> None:
            vllm_config.additional_config = {CONFIG_KEY: {"policy": policy}}

        plain = _without_async_bookkeeping(ProgramScheduler) if synchronous else ProgramScheduler
        _replace_constructor(Scheduler, {Scheduler: plain, AsyncScheduler: ProgramScheduler})
        _replace_constructor(BlockPool, {BlockPool: ProgramBlockPool}, called_in=self._tests)
        _replace_constructor(
            KVCacheManager, {KVCacheManager: ProgramKVCacheManager}, called_in=self._tests
        )
        self._note_instances(ProgramBlockPool)
        self._note_instances(ProgramScheduler, before=set_policy)
        _show_ends_of_the_free_queue()

    def give_requests_programs(self) -> None:
        """Every request is the turn of a program of its own."""
        from vllm.v1.request import Request

        from vllm_thunder.program.turn import Turn

        original_init = Request.__init__

        def request_init(request: Any, *args: Any, **kwargs: Any) -> None:
            original_init(request, *args, **kwargs)
            if request.program is None:
                name = request.request_id
                request.program = Turn(
                    program_id=f"program of {name}", turn_id=name, priority=request.priority
                )

        Request.__init__ = request_init

    def problems(self) -> list[str]:
        """What the books of the objects that the current test built say against themselves."""
        from vllm_thunder.program.errors import IntegrityError

        found: dict[str, None] = {}  # a scheduler's books are those of its pool, too
        for thing in self.built:
            try:
                thing.check_integrity()
            except IntegrityError as error:
                found[str(error)] = None
        return list(found)

    def _note_instances(
        self, cls: type, *, before: Callable[[Any], None] = lambda vllm_config: None
    ) -> None:
        """Keep what is built; ``before`` is called with the ``vllm_config`` that it is built of."""
        original_init = cls.__init__  # type: ignore[misc]

        def init(instance: Any, *args: Any, **kwargs: Any) -> None:
            before(kwargs.get("vllm_config"))
            original_init(instance, *args, **kwargs)
            self.built.append(instance)

        cls.__init__ = init  # type: ignore[misc]


def _show_ends_of_the_free_queue() -> None:
    """Some tests look at the first and last free block through the sentinels of vLLM's one linked
    list; our queue has several lists, so sentinels are made when they are asked for."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from vllm_thunder.engine.free_queue import ProgramFreeQueue

    ends: WeakKeyDictionary[ProgramFreeQueue, tuple[KVCacheBlock, KVCacheBlock]]
    ends = WeakKeyDictionary()

    def sentinels(queue: ProgramFreeQueue) -> tuple[KVCacheBlock, KVCacheBlock]:
        head, tail = ends.setdefault(queue, (KVCacheBlock(block_id=-1), KVCacheBlock(block_id=-1)))
        free = queue.get_all_free_blocks()
        head.next_free_block = free[0] if free else tail
        tail.prev_free_block = free[-1] if free else head
        return head, tail

    ProgramFreeQueue.fake_free_list_head = property(lambda queue: sentinels(queue)[0])
    ProgramFreeQueue.fake_free_list_tail = property(lambda queue: sentinels(queue)[1])


def _replace_constructor(
    base: type, replacements: dict[type, type], *, called_in: str = ""
) -> None:
    """Calling a key makes an instance of its value. The keys are ``base`` or derived from it.

    ``called_in``: only in files whose names begin so. vLLM's own code builds pools that stay
    vLLM's.
    """

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(called_in):
            cls = replacements.get(cls, cls)
        return object.__new__(cls)

    base.__new__ = staticmethod(make)  # type: ignore[method-assign, assignment]


def _without_async_bookkeeping(ours: type) -> type:
    """Our scheduler with every step's output known before the next is scheduled: each method that
    vLLM's ``AsyncScheduler`` overrides is the one of vLLM's ``Scheduler`` again."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    names = [
        n for n, value in vars(AsyncScheduler).items() if isfunction(value) and n != "__init__"
    ]
    clash = [name for name in names if name in vars(ours)]
    if clash:
        raise TypeError(f"{ours.__name__} overrides {clash}: the tests would not reach that")
    return type(f"Synchronous{ours.__name__}", (ours,), {n: vars(Scheduler)[n] for n in names})


class Recorder:
    """One line of JSON per test: ``id``, ``outcome``, ``message``, ``built`` and ``problems``."""

    def __init__(self, results: Path, substitution: Substitution) -> None:
        self._file = results.open("w")
        self._substitution = substitution
        self._outcome, self._message = "passed", ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What the others are compared with has to be vLLM as released."""
        stock = session.config.getoption("scheduler").startswith("stock")
        if stock == ("vllm_thunder" in sys.modules):
            raise pytest.UsageError(f"patched vLLM where {'stock' if stock else 'ours'} is meant")

    def pytest_runtest_logstart(self) -> None:
        self._substitution.built.clear()
        self._outcome, self._message = "passed", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome = report.outcome
            crash = getattr(report.longrepr, "reprcrash", None)
            text = report.longreprtext if crash is None else f"{crash.lineno}: {crash.message}"
            self._message = text

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        built = [type(thing).__name__ for thing in self._substitution.built]
        line = {
            "id": nodeid,
            "outcome": self._outcome,
            "message": self._message,
            "built": built,
            "problems": self._substitution.problems() if built else [],
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--results", type=Path, required=True, help="the file to write")
    group.addoption(
        "--scheduler",
        choices=("stock", "stock-async", "ours", "ours-sync"),
        required=True,
        help="what stands where a test builds vLLM's synchronous scheduler; "
        "ours-sync: ours without the bookkeeping of steps in flight",
    )
    group.addoption("--policy", default="thunder", help="of our scheduler")
    group.addoption("--programs", action="store_true", help="each request is a program's turn")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_test: vLLM's mark")
    config.addinivalue_line("markers", "skip_global_cleanup: vLLM's mark")
    config.addinivalue_line("markers", "optional: vLLM's mark")
    substitution = Substitution(str(config.rootpath / "tests") + "/")
    scheduler = config.getoption("scheduler")
    if scheduler == "stock-async":
        substitution.put_async_in_place()
    elif scheduler != "stock":
        substitution.put_ours_in_place(
            synchronous=scheduler == "ours-sync", policy=config.getoption("policy")
        )
    if config.getoption("programs"):
        substitution.give_requests_programs()
    config.pluginmanager.register(Recorder(config.getoption("results"), substitution))


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's ``conftest.py`` has it: log records of vLLM, which does not propagate them."""
    logger = logging.getLogger("vllm")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO):
        yield caplog
    logger.propagate = before
