"""The queue of turns that are held back."""

from vllm.v1.request import Request

__all__ = ["HeldTurns"]


class HeldTurns(dict[str, Request]):
    """Held requests by id, in the order in which they were held."""

    def __init__(self) -> None:
        super().__init__()
        #: Those of them whose grammar may turn out not to compile.
        self.grammars: dict[str, Request] = {}

    def hold(self, request: Request) -> None:
        self[request.request_id] = request
        if request.structured_output_request is not None:
            self.grammars[request.request_id] = request

    def take(self, request_id: str) -> Request:
        """The request is held no longer."""
        self.grammars.pop(request_id, None)
        return self.pop(request_id)

    def broken(self) -> list[str]:
        """Ids of requests whose grammar has failed to compile."""
        return [
            request_id
            for request_id, request in self.grammars.items()
            if isinstance(request.structured_output_request.grammar, Exception)
        ]
