"""What the coordinator itself asks an engine's server."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from vllm_thunder.program.endpoints import PROGRAM_ROUTES
from vllm_thunder.program.errors import ThunderError
from vllm_thunder.program.report import EngineReport

__all__ = ["EngineClient", "EngineError", "ServerFacts"]

#: Text that tokenizers disagree about: cases, spaces, digits, scripts, code, symbols.
_PROBE = "The quick brown Fox\n\t def f(x): return {'a': 12345.678}  # čeština 中文 🙂 <|im_start|>"

#: What does not say that a server cannot do something: it wants another key, or more time.
_NOT_NOW = (401, 403, 503)


class EngineError(ThunderError):
    """An engine did not answer, or not as an engine does; the message names it."""


class _Model(msgspec.Struct):
    id: str
    parent: Any = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Summary(msgspec.Struct):
    ranks: Annotated[int, msgspec.Meta(ge=1)]


class _Tokens(msgspec.Struct):
    tokens: tuple[int, ...]


class _Released(msgspec.Struct):
    released: bool


class _Known(msgspec.Struct):
    known: bool


_Answer = TypeVar("_Answer")


class ServerFacts(msgspec.Struct, frozen=True):
    """What has to be the same on all engines, and how many of them the server is.

    ``models``: names that it serves, adapters apart. ``longest_context``: tokens; None: it does not
    say. ``tokens``: what its tokenizer makes of a probe; None: it cannot be asked.
    ``context_groups``: as of MemoryReport; None: not known. ``knows_programs``: it is one of ours.
    ``ranks``: data-parallel ranks.
    """

    models: tuple[str, ...]
    longest_context: int | None
    tokens: tuple[int, ...] | None
    context_groups: list[tuple[int, int | None]] | None
    knows_programs: bool
    ranks: int


class EngineClient:
    """Asks one server. Every method raises EngineError when the answer is not what it should be,
    or has not come after ``timeout`` seconds, or what is given."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, api_key: str | None, timeout: float
    ):
        self.url = url
        self._timeout = timeout
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def facts(self) -> ServerFacts:
        """What the server is, asked anew."""
        listed = await self._json("GET", "/v1/models", _Models)
        bases = [model for model in listed.data if not model.parent]
        if not bases:
            raise EngineError(f"{self.url}: /v1/models names no model")
        summary = await self._json_or_none("GET", f"{PROGRAM_ROUTES}/summary", _Summary)
        names = tuple(sorted(model.id for model in bases))
        ranks = 1 if summary is None else summary.ranks
        groups = None
        if summary is not None:
            report = await self.changes(None if ranks == 1 else 0, "", 0.0, self._timeout)
            groups = report.memory.context_groups
        return ServerFacts(
            models=names,
            longest_context=bases[0].max_model_len,
            tokens=await self._tokens(names[0]),
            context_groups=groups,
            knows_programs=summary is not None,
            ranks=ranks,
        )

    async def healthy(self) -> bool:
        """Whether the server says that it is well."""
        try:
            status, _ = await self._ask("GET", "/health")
        except EngineError:
            return False
        return status == 200

    async def changes(
        self, rank: int | None, cursor: str, wait: float, seconds: float
    ) -> EngineReport:
        """What has changed since ``cursor``, waited for; EngineError also after ``seconds``."""
        query: dict[str, str] = {"after": cursor, "wait": f"{wait:g}"}
        if rank is not None:
            query["rank"] = str(rank)
        path = f"{PROGRAM_ROUTES}/changes?{urlencode(query)}"
        status, body = await self._ask("GET", path, seconds=seconds)
        self._expect_ok("GET", path, status, body)
        return self._decoded(path, body, EngineReport)

    async def release(self, program_id: str) -> bool:
        """End a program there; whether there was one."""
        path, told = f"{PROGRAM_ROUTES}/release", {"program_id": program_id}
        return (await self._json("POST", path, _Released, told)).released

    async def tool(self, program_id: str, tool_name: str) -> bool:
        """A program runs a tool; whether it is known there."""
        path = f"{PROGRAM_ROUTES}/tool"
        told = {"program_id": program_id, "tool_name": tool_name}
        return (await self._json("POST", path, _Known, told)).known

    async def page(self, path: str) -> bytes | None:
        """The body of a page; None: the server has no such page."""
        status, body = await self._ask("GET", path)
        if status == 404:
            return None
        self._expect_ok("GET", path, status, body)
        return body

    async def _tokens(self, model: str) -> tuple[int, ...] | None:
        status, answer = await self._ask("POST", "/tokenize", {"model": model, "prompt": _PROBE})
        if status >= 400 and status not in _NOT_NOW:
            return None  # SGLang without a tokenizer answers 500
        self._expect_ok("POST", "/tokenize", status, answer)
        return self._decoded("/tokenize", answer, _Tokens).tokens

    async def _json(self, method: str, path: str, kind: type[_Answer], body: Any = None) -> _Answer:
        status, answer = await self._ask(method, path, body)
        self._expect_ok(method, path, status, answer)
        return self._decoded(path, answer, kind)

    async def _json_or_none(
        self, method: str, path: str, kind: type[_Answer], body: Any = None
    ) -> _Answer | None:
        """None where the server does not know the path."""
        status, answer = await self._ask(method, path, body)
        if status in (404, 405):
            return None
        self._expect_ok(method, path, status, answer)
        return self._decoded(path, answer, kind)

    def _decoded(self, path: str, answer: bytes, kind: type[_Answer]) -> _Answer:
        try:
            return msgspec.json.decode(answer, type=kind)
        except (ValueError, RecursionError) as error:  # no UTF-8, JSON of that shape, or too deep
            raise EngineError(f"{self.url}{path}: the answer cannot be read: {error}") from error

    def _expect_ok(self, method: str, path: str, status: int, body: bytes) -> None:
        if status in (401, 403):
            raise EngineError(
                f"{self.url}: wants another API key than --engine-api-key gives ({status})"
            )
        if status != 200:
            text = body[:200].decode(errors="replace")
            raise EngineError(f"{self.url}: {method} {path} was answered with {status}: {text}")

    async def _ask(
        self, method: str, path: str, body: Any = None, *, seconds: float | None = None
    ) -> tuple[int, bytes]:
        seconds = self._timeout if seconds is None else seconds
        headers: Mapping[str, str] = self._headers
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers = {**headers, "Content-Type": "application/json"}
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
            ) as answer:
                return answer.status, await answer.read()
        except TimeoutError as error:
            problem = f"no answer to {method} {path} in {seconds:g} s"
            raise EngineError(f"{self.url}: {problem}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(
                f"{self.url}: {method} {path} failed: {str(error) or repr(error)}"
            ) from error
