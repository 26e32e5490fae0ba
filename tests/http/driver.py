"""Drives ASGI applications message by message, with an engine client that only answers."""

import asyncio
import json
from argparse import Namespace
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from vllm_thunder.engine.http import ProgramMiddleware
from vllm_thunder.program.context import current_turn

JSON = {"content-type": "application/json"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeCore:
    """An engine core client: ``answers[op]`` is a value per rank, or an exception."""

    answers: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple] = field(default_factory=list)
    delay: float = 0.0
    rank_count: int = 1

    @property
    def core_engines(self) -> list[bytes]:
        """The name of each data-parallel rank."""
        return [rank.to_bytes(2, "little") for rank in range(self.rank_count)]

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        assert method == "programs"
        self.calls.append(args)
        await asyncio.sleep(self.delay)
        answer = self.answers.get(args[0], [None])
        if isinstance(answer, Exception):
            raise answer
        return answer


class RanksCore(FakeCore):
    """Lists the programs of each rank as engine cores do: at most so many, by id, after an id."""

    def __init__(self, ranks: list[dict[str, Any]]):
        super().__init__()
        self.ranks = ranks
        self.described = 0

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        if args[0] != "list":
            return await super().call_utility_all_async(method, *args)
        after, limit = args[1], int(args[2])
        lists = [
            [rank[name] for name in sorted(rank) if name > after][:limit] for rank in self.ranks
        ]
        self.described += sum(map(len, lists))
        return lists


@dataclass
class Model:
    """Stands for vLLM's application: keeps what it was asked, and answers 200."""

    turns: list[Any] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    disconnected: int = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            self.turns.append(current_turn.get())
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected += 1
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.turns.append(current_turn.get())
        self.bodies.append(body)
        self.paths.append(scope["path"])
        self.headers.append({k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]})
        await self.answer(scope, receive, send)

    async def answer(self, scope, receive, send) -> None:
        headers = [(b"content-type", b"text/plain"), (b"x-model", b"yes")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"mod", "more_body": True})
        await send({"type": "http.response.body", "body": b"el", "more_body": False})


class Server:
    """``ProgramMiddleware`` around a model, as vLLM's FastAPI application would hold it."""

    def __init__(self, model=None, core: FakeCore | None = None, **args: Any):
        self.model = model if model is not None else Model()
        self.core = core if core is not None else FakeCore()
        defaults: dict[str, Any] = {
            "api_key": None,
            "allowed_origins": [],
            "allow_credentials": False,
            "allowed_methods": ["*"],
            "allowed_headers": ["*"],
            "enable_request_id_headers": False,
        }
        self.root_path = args.pop("root_path", "")
        self.state = SimpleNamespace(
            args=Namespace(**{**defaults, **args}),
            engine_client=SimpleNamespace(engine_core=self.core),
        )
        self.middleware = ProgramMiddleware(self.model)

    async def __call__(self, scope, receive, send) -> None:
        scope["app"] = self
        scope["root_path"] = self.root_path
        await self.middleware(scope, receive, send)

    async def request(
        self,
        method: str,
        target: str,
        body: Any = b"",
        headers: dict[str, str] | None = None,
        chunks: list[bytes] | None = None,
        then: list[dict] | None = None,
    ) -> Answer:
        """One request; ``body`` that is no bytes is sent as JSON, ``then`` follows the body."""
        headers = dict(headers or {})
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers = {**JSON, **headers}
        chunks = [body] if chunks is None else chunks
        headers.setdefault("content-length", str(sum(map(len, chunks))))
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [
                (k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()
            ],
        }
        incoming = [
            {"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)}
            for i, chunk in enumerate(chunks)
        ]
        incoming += then if then is not None else [{"type": "http.disconnect"}]
        sent: list[dict] = []

        async def receive():
            return incoming.pop(0)

        async def send(message):
            sent.append(message)

        await self(scope, receive, send)
        self.sent = sent
        if not sent:
            return Answer(0, {}, b"")
        raw = [(k.decode().lower(), v.decode("latin-1")) for k, v in sent[0]["headers"]]
        content = b"".join(message.get("body", b"") for message in sent[1:])
        return Answer(sent[0]["status"], dict(raw), content)

    async def post(self, target: str, body: Any, headers=None, **kwargs: Any) -> Answer:
        return await self.request("POST", target, body, headers, **kwargs)

    async def get(self, target: str, headers=None) -> Answer:
        return await self.request("GET", target, headers=headers)
