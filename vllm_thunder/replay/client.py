"""One program's conversation with an OpenAI-compatible server, and what else the server says."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from vllm_thunder.program.errors import ConfigError, ThunderError
from vllm_thunder.replay.records import StepRecord

__all__ = ["CallFailed", "ChatClient", "ClientOptions", "Conversations"]

_HEADER = "header:"
_CONTROL_SECONDS = 30.0  # for calls that no model work hangs on


class CallFailed(ThunderError):
    """A call did not give a whole answer; the text says why."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How the replay talks to a server.

    ``program_id_field`` is where a program's id goes: a field of the body (dots nest:
    ``vllm_xargs.session_id``), ``header:NAME``, or None to send none. ``final_field``, written
    the same way, is set to true in a program's last call. ``release_path`` takes
    ``{"program_id": id}`` by POST when a program ends; None never releases.

    ``max_concurrent_programs`` starts no further program while that many run.
    ``unlabelled_share`` of the programs send no id. ``exact_output`` asks for exactly as many
    tokens as the step says, with vLLM's ``ignore_eos`` and ``min_tokens``; without it the number
    is a limit only. ``words_per_token`` is for tokenizers that cut the replay's words.

    ``step_timeout`` ends a call, ``run_timeout`` the whole run; both in seconds. After
    ``window_seconds`` the run ends too, but on purpose: no program has failed by that.
    """

    base_url: str
    model: str | None = None
    program_id_field: str | None = "program_id"
    final_field: str | None = None
    release_path: str | None = "/programs/release"
    max_concurrent_programs: int | None = None
    unlabelled_share: float = 0.0
    exact_output: bool = True
    words_per_token: float = 1.0
    step_timeout: float = 900.0
    run_timeout: float | None = None
    window_seconds: float | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--url: {self.base_url!r} does not start with http:// or https://")
        for flag, text in (
            ("--program-id-field", self.program_id_field),
            ("--final-field", self.final_field),
        ):
            if text is not None and not all(text.removeprefix(_HEADER).split(".")):
                raise ConfigError(f"{flag}: {text!r} is neither a field nor header:NAME")
        if self.release_path is not None and not self.release_path.startswith("/"):
            raise ConfigError(f"--release-path: {self.release_path!r} does not start with /")
        if self.max_concurrent_programs is not None and self.max_concurrent_programs < 1:
            raise ConfigError(
                f"--max-concurrent-programs: {self.max_concurrent_programs} is below 1"
            )
        if not 0.0 <= self.unlabelled_share <= 1.0:
            raise ConfigError(f"--unlabelled-share: {self.unlabelled_share} is outside [0, 1]")
        for flag, seconds in (
            ("--step-timeout", self.step_timeout),
            ("--run-timeout", self.run_timeout),
            ("--window", self.window_seconds),
            ("--words-per-token", self.words_per_token),
        ):
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"{flag}: {seconds} is not above 0")


class Conversations(Protocol):
    """Who carries a replay's calls: :class:`ChatClient`, or a client of several servers. The
    methods are described there."""

    options: ClientOptions
    model: str

    async def step(
        self,
        record: StepRecord,
        messages: list[dict[str, str]],
        output_tokens: int,
        *,
        final: bool,
    ) -> str: ...

    async def release(self, program_id: str) -> str | None: ...

    async def counters(self) -> dict[str, float]: ...

    async def summary(self) -> dict[str, Any] | None: ...


class ChatClient:
    """Calls one server. Use as an async context manager."""

    def __init__(self, options: ClientOptions):
        self.options = options
        self.model = options.model or ""
        self._url = options.base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # The workload alone bounds concurrency. A connection for each call: servers close one
            # that was idle for some seconds, and a POST that crosses that is lost.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            read_bufsize=1 << 20,
        )

    async def __aenter__(self) -> "ChatClient":
        try:
            if not self.model:
                self.model = await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._session.close()

    async def _first_model(self) -> str:
        models = await self._get_json("/v1/models")
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise CallFailed(f"{self._url}/v1/models names no model: use --model") from None

    async def step(
        self,
        record: StepRecord,
        messages: list[dict[str, str]],
        output_tokens: int,
        *,
        final: bool,
    ) -> str:
        """One streamed model call. Fills in ``record`` and returns the assistant's text.

        A failure of any kind is written to ``record.error`` and raised as CallFailed.
        """
        options = self.options
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.exact_output:
            body |= {"ignore_eos": True, "min_tokens": output_tokens}
        headers: dict[str, str] = {}
        if record.labelled:
            _put(options.program_id_field, record.program_id, body, headers)
            if final:
                _put(options.final_field, True, body, headers)
        start = time.perf_counter()
        try:
            async with asyncio.timeout(options.step_timeout):
                return await self._stream(record, body, headers, start)
        except TimeoutError:
            record.error = f"no whole answer within {options.step_timeout:g} s"
        except (aiohttp.ClientError, OSError, ValueError, CallFailed) as error:
            record.error = str(error) or type(error).__name__
        except asyncio.CancelledError:
            record.error = "the run was stopped"
            raise
        finally:
            record.latency_seconds = time.perf_counter() - start
        raise CallFailed(record.error)

    async def _stream(
        self, record: StepRecord, body: dict[str, Any], headers: dict[str, str], start: float
    ) -> str:
        text: list[str] = []
        url = f"{self._url}/v1/chat/completions"
        # The call's own time-out bounds it as a whole; aiohttp's default of five minutes would
        # end a long wait that the caller allows.
        no_limit = aiohttp.ClientTimeout(total=None, sock_connect=_CONTROL_SECONDS)
        async with self._session.post(url, json=body, headers=headers, timeout=no_limit) as answer:
            if answer.status != 200:
                raise CallFailed(f"HTTP {answer.status}: {(await answer.text())[:500]}")
            async for chunk in _events(answer):
                if "error" in chunk:
                    raise CallFailed(f"error in the stream: {json.dumps(chunk['error'])[:500]}")
                for choice in chunk.get("choices") or ():
                    piece = (choice.get("delta") or {}).get("content")
                    if piece:
                        if record.first_token_seconds is None:
                            record.first_token_seconds = time.perf_counter() - start
                        text.append(piece)
                    record.finish_reason = choice.get("finish_reason") or record.finish_reason
                if usage := chunk.get("usage"):
                    record.prompt_tokens = usage.get("prompt_tokens")
                    record.completion_tokens = usage.get("completion_tokens")
                    details = usage.get("prompt_tokens_details") or {}
                    record.cached_tokens = details.get("cached_tokens")
        return "".join(text)

    async def release(self, program_id: str) -> str | None:
        """Tell the server that a program is over. Returns what went wrong, or None."""
        url = f"{self._url}{self.options.release_path}"
        limit = aiohttp.ClientTimeout(total=_CONTROL_SECONDS)
        try:
            async with self._session.post(
                url, json={"program_id": program_id}, timeout=limit
            ) as answer:
                if answer.status == 200:
                    return None
                return f"release: HTTP {answer.status}: {(await answer.text())[:200]}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"release: {str(error) or type(error).__name__}"

    async def counters(self) -> dict[str, float]:
        """The server's Prometheus counters by sample name, summed over labels; histograms give
        their ``_sum`` and ``_count``. Empty where the server has no ``/metrics``; CallFailed where
        there is no server."""
        url = f"{self._url}/metrics"
        limit = aiohttp.ClientTimeout(total=_CONTROL_SECONDS)
        try:
            async with self._session.get(url, timeout=limit) as answer:
                if answer.status != 200:
                    return {}
                page = await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise CallFailed(f"{url}: {str(error) or type(error).__name__}") from error
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.endswith(("_total", "_sum", "_count")):
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    async def summary(self) -> dict[str, Any] | None:
        """The server's ``GET /programs/summary``, or None where it has none."""
        try:
            found = await self._get_json("/programs/summary")
        except CallFailed:
            return None
        return found if isinstance(found, dict) else None

    async def _get_json(self, path: str) -> Any:
        limit = aiohttp.ClientTimeout(total=_CONTROL_SECONDS)
        try:
            async with self._session.get(f"{self._url}{path}", timeout=limit) as answer:
                if answer.status != 200:
                    raise CallFailed(f"{self._url}{path}: HTTP {answer.status}")
                return await answer.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise CallFailed(f"{self._url}{path}: {str(error) or type(error).__name__}") from error


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, which has to end with ``[DONE]``.

    What comes after that is read, too: who closes the connection before its end looks like a client
    that went away, and the next call needs a new one.
    """
    done = False
    async for line in answer.content:
        if done or not line.startswith(b"data:"):
            continue  # blank lines between events, and comments that keep the connection open
        data = line[len(b"data:") :].strip()
        done = data == b"[DONE]"
        if not done:
            yield json.loads(data)
    if not done:
        raise CallFailed("the stream ended before [DONE]")


def _put(field: str | None, value: Any, body: dict[str, Any], headers: dict[str, str]) -> None:
    if field is None:
        return
    if field.startswith(_HEADER):
        headers[field.removeprefix(_HEADER)] = "true" if value is True else str(value)
        return
    *parents, leaf = field.split(".")
    for parent in parents:
        body = body.setdefault(parent, {})
    body[leaf] = value
