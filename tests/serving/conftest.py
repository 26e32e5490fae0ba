"""Real servers. Most tests share one; every test has to leave it as it found it."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.serving.client import Client
from vllm_thunder.replay.server import ServerSpec, running_server
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model

KEY = "the key of the tests"
BLOCKS = 200
BLOCK_SIZE = 32
MAX_MODEL_LEN = 4096


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.engine)
    items.sort(key=lambda item: "ending_server" in getattr(item, "fixturenames", ()))


@dataclass(frozen=True)
class Server:
    """A server that runs. ``process`` is the one that was started, a child of this one."""

    url: str
    process: psutil.Process
    log: Path

    @property
    def engine_cores(self) -> list[psutil.Process]:
        children = self.process.children(recursive=True)
        return [p for p in children if "EngineCore" in "".join(p.cmdline())]


ServeWith = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def serve_with(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, repo_root: Path
) -> ServeWith:
    """Start a server with further flags; one that has failed shows the end of its log."""

    @contextmanager
    def served(*flags: str, blocks: int = BLOCKS) -> Iterator[Server]:
        spec = ServerSpec(
            "thunder",
            tiny_model,
            usable_blocks=blocks,
            block_size=BLOCK_SIZE,
            kv_bytes_per_token=TinyModel().kv_bytes_per_token,
            max_model_len=MAX_MODEL_LEN,
            extra=(
                "--api-key",
                KEY,
                "--middleware",
                "tests.serving.middleware.IntegrityMiddleware",
                *flags,
            ),
            dev_mode=True,
        )
        log = tmp_path_factory.mktemp("server") / "server.log"
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PYTHONPATH", str(repo_root))
            before = set(psutil.Process().children())
            with running_server(spec, log) as url:
                (process,) = set(psutil.Process().children()) - before
                yield Server(url, process, log)

    return served


@pytest.fixture(scope="session")
def server(serve_with: ServeWith) -> Iterator[Server]:
    with serve_with() as server:
        yield server


@pytest.fixture
def ending_server(server: Server) -> Server:
    """The shared server, for the one test that ends it and so is put behind all others."""
    return server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    """A client of the shared server, which must be empty when the test ends."""
    async with Client(server.url, KEY) as client:
        yield client
        await client.leave_clean()
