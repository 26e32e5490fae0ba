"""The log as lines of JSON, one for each record."""

import json
import logging
from dataclasses import asdict
from datetime import UTC, datetime

from vllm_thunder.coordinator.proxy.exchange import Exchange, Outcome

__all__ = ["JsonLines", "log_call"]

#: The attribute of a record that holds the request that it tells of.
_CALL = "exchange"


class JsonLines(logging.Formatter):
    """``time`` (UTC), ``level``, ``logger``, ``message``; of a call also all that there is to tell
    of it, of an error its ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        exchange = getattr(record, _CALL, None)
        if isinstance(exchange, Exchange):
            told |= asdict(exchange)
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told)


def log_call(logger: logging.Logger, exchange: Exchange) -> None:
    """A request is over. An id that the client gave is in its engine's log too, and the trace is
    the one that its engine's span is in."""
    level = logging.INFO if exchange.outcome is Outcome.OK else logging.WARNING
    logger.log(level, "%s: %s", exchange.path, exchange.outcome, extra={_CALL: exchange})
