"""Error answers in the shape that vLLM uses on each endpoint."""

from http import HTTPStatus

from starlette.responses import JSONResponse
from vllm.entrypoints.anthropic.protocol import AnthropicError, AnthropicErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

__all__ = ["bad_request", "error_response"]


def bad_request(path: str, message: str, field: str | None = None) -> JSONResponse:
    """HTTP 400 as the endpoint at ``path`` gives it: OpenAI's shape, Anthropic's under
    ``/v1/messages``, Cohere's under ``/cohere``."""
    error = create_error_response(message, param=field).error
    if path.startswith("/v1/messages"):
        shape = AnthropicErrorResponse(error=AnthropicError(type=error.type, message=error.message))
        return JSONResponse(shape.model_dump(), status_code=error.code)
    if path.startswith("/cohere/"):
        return JSONResponse({"message": error.message}, status_code=error.code)
    return error_response(message, HTTPStatus.BAD_REQUEST, field)


def error_response(
    problem: str | Exception, status: HTTPStatus, field: str | None = None
) -> JSONResponse:
    """OpenAI's error shape. An exception of vLLM's brings its own status."""
    name = "".join(status.phrase.split()) + ("" if status.phrase.endswith("Error") else "Error")
    body = create_error_response(problem, name, status, field)
    return JSONResponse(body.model_dump(), status_code=body.error.code)
