"""What a test says to a server: model calls, streams that can be cut, and questions."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp

from tests.serving.middleware import CHECK
from vllm_thunder.replay.words import write_words

MODEL = "replayed"
#: Tokens of a prompt that does not fit beside :meth:`Client.crowd` in the shared server's memory.
CROWDED_OUT = 2600

#: What each endpoint needs besides the model: the prompt's field and the limit's name.
ENDPOINTS = {
    "/v1/chat/completions": ("messages", "max_tokens"),
    "/v1/completions": ("prompt", "max_tokens"),
    "/v1/responses": ("input", "max_output_tokens"),
    "/v1/messages": ("messages", "max_tokens"),
}


class Refused(AssertionError):
    """The server did not answer 200."""

    def __init__(self, status: int, text: str):
        super().__init__(f"HTTP {status}: {text[:1000]}")
        self.status = status
        self.text = text


class Stream:
    """Server-sent events of one call, as JSON objects; ``done`` once the last one came."""

    def __init__(self, answer: aiohttp.ClientResponse):
        self._answer = answer
        self.events: list[dict[str, Any]] = []

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        async for line in self._answer.content:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            self.events.append(event)
            yield event

    async def take(self, count: int) -> None:
        """Read ``count`` events."""
        async for _ in self:
            count -= 1
            if count == 0:
                return
        raise AssertionError(f"the stream ended after {len(self.events)} events: {self.events}")

    async def rest(self) -> list[dict[str, Any]]:
        """Read to the end; every event since the start."""
        async for _ in self:
            pass
        return self.events

    def cut(self) -> None:
        """Close the socket at once, as a client that dies."""
        self._answer.close()


class Client:
    """One user of one server. Use as an async context manager."""

    def __init__(self, url: str, key: str | None):
        self.url = url
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # vLLM closes idle connections after 5 s: one that is used in that moment is lost.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=240),
            read_bufsize=1 << 20,
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._session.close()

    # -- raw calls ---------------------------------------------------------------------

    async def request(
        self, method: str, path: str, *, own_connection: bool = False, **kwargs: Any
    ) -> tuple[int, str]:
        """Status and text of the answer. ``own_connection``: on a new one, used once."""
        if own_connection:
            kwargs["headers"] = {**kwargs.get("headers", {}), "Connection": "close"}
        async with self._session.request(method, self.url + path, **kwargs) as answer:
            return answer.status, await answer.text()

    async def json(self, method: str, path: str, **kwargs: Any) -> Any:
        """The answer's JSON. Raises Refused unless its status is 200."""
        status, text = await self.request(method, path, **kwargs)
        if status != 200:
            raise Refused(status, text)
        return json.loads(text) if text else None

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any], **kwargs: Any) -> AsyncIterator[Stream]:
        body = {**body, "stream": True}
        async with self._session.post(self.url + path, json=body, **kwargs) as answer:
            if answer.status != 200:
                raise Refused(answer.status, await answer.text())
            yield Stream(answer)

    # -- model calls -------------------------------------------------------------------

    async def complete(
        self, prompt: str | list[int], program_id: Any = None, *, tokens: int = 4, **fields: Any
    ) -> dict[str, Any]:
        """One turn of exactly ``tokens`` tokens on the completions endpoint."""
        return await self.json(
            "POST", "/v1/completions", json=completion(prompt, program_id, tokens=tokens, **fields)
        )

    @asynccontextmanager
    async def generating(
        self, prompt: str, program_id: Any = None, *, tokens: int = 1000, **fields: Any
    ) -> AsyncIterator[Stream]:
        """A streamed turn, open; it may be held and say nothing yet."""
        body = completion(prompt, program_id, tokens=tokens, **fields)
        async with self.stream("/v1/completions", body) as stream:
            yield stream

    @asynccontextmanager
    async def crowd(self, tokens: int = 2000) -> AsyncIterator[list[Stream]]:
        """Two programs that generate ``tokens`` tokens each and fill two thirds of the memory: a
        new program with a prompt of CROWDED_OUT tokens is held until one of them ends."""
        for _ in range(5):
            # What a server has learned from long outputs of earlier turns would hold the second.
            for _ in range(10):
                await self.complete("short", "short outputs", tokens=1)
            await self.release("short outputs")
            async with (
                self.generating(words(2000, "crowd 1"), "crowd 1", tokens=tokens) as one,
                self.generating(words(2000, "crowd 2"), "crowd 2", tokens=tokens) as two,
            ):
                await one.take(1)
                await two.take(1)
                if (await self.summary())["by_phase"]["REASONING"] == 2:
                    yield [one, two]
                    one.cut()
                    two.cut()
                    return
            # On a machine that is busy with other things vLLM may pass tokens on so late that a
            # turn has ended before its first is seen.
            await self.until_idle()
            for program_id in ("crowd 1", "crowd 2"):
                await self.release(program_id)
        raise AssertionError("no crowd: a turn ends before both have begun")

    # -- questions ---------------------------------------------------------------------

    async def summary(self) -> dict[str, Any]:
        return await self.json("GET", "/programs/summary")

    async def programs(self) -> list[dict[str, Any]]:
        return (await self.json("GET", "/programs"))["programs"]

    async def program(self, program_id: str) -> dict[str, Any] | None:
        status, text = await self.request("GET", "/programs/" + quote(program_id, safe=""))
        if status == 404:
            return None
        if status != 200:
            raise Refused(status, text)
        return json.loads(text)

    async def release(self, program_id: str) -> dict[str, Any]:
        return await self.json("POST", "/programs/release", json={"program_id": program_id})

    async def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics`` that have no labels but vLLM's own engine labels, by name."""
        status, text = await self.request("GET", "/metrics")
        assert status == 200, text
        samples: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name.partition("{")[0] if name.startswith("vllm:") else name] = float(value)
        return samples

    async def until(
        self, condition: Callable[[dict[str, Any]], bool], seconds: float = 60.0
    ) -> dict[str, Any]:
        """The first summary that meets ``condition``."""
        deadline = time.monotonic() + seconds
        while not condition(summary := await self.summary()):
            assert time.monotonic() < deadline, f"not within {seconds} s; last: {summary}"
            await asyncio.sleep(0.02)
        return summary

    async def until_idle(self, seconds: float = 60.0) -> dict[str, Any]:
        """No turn is in flight any more."""
        return await self.until(lambda s: s["by_phase"]["REASONING"] == 0, seconds)

    async def check_integrity(self) -> int:
        """A recount of all books in the engines; the pid of the API server that answered."""
        answer = await self.json("GET", CHECK, own_connection=True)
        assert answer["problem"] is None, answer["problem"]
        return answer["pid"]

    async def release_all(self) -> None:
        await asyncio.gather(*(self.release(p["program_id"]) for p in await self.programs()))

    async def leave_clean(self) -> None:
        """Nothing is in flight, and after a release of all programs every block is free."""
        await self.until_idle()
        await self.check_integrity()
        await self.release_all()
        summary = await self.until(lambda s: s["free_blocks"] == s["total_blocks"])
        left = {name: summary[name] for name in ("programs", "held_turns", "unique_blocks")}
        assert left == {"programs": 0, "held_turns": 0, "unique_blocks": 0}
        assert summary["shared_blocks"] == 0
        await self.check_integrity()


def completion(
    prompt: str | list[int], program_id: Any = None, *, tokens: int = 4, **fields: Any
) -> dict[str, Any]:
    """A completions body that gives exactly ``tokens`` tokens."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    return body if program_id is None else {**body, "program_id": program_id}


def call_body(path: str, text: str, *, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A body for any of ENDPOINTS."""
    prompt_field, limit = ENDPOINTS[path]
    prompt: Any = [{"role": "user", "content": text}] if prompt_field == "messages" else text
    return {"model": MODEL, prompt_field: prompt, limit: tokens, "temperature": 0, **fields}


def words(count: int, seed: str) -> str:
    """Text of ``count`` tokens."""
    return " " + write_words(count, seed)


def shape(value: Any) -> Any:
    """The names in a JSON value, without its values: all that a client can tell apart by."""
    if isinstance(value, dict):
        return {name: shape(member) for name, member in value.items()}
    if isinstance(value, list):
        return [shape(member) for member in value]
    return None
