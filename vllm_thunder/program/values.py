"""What single values of a request may be: each as its meaning, or an error that names the field."""

from typing import Any

from vllm_thunder.program.errors import IdentityError

__all__ = [
    "LONGEST_SECONDS",
    "MAX_ID_BYTES",
    "boolean_of",
    "object_of",
    "program_id_of",
    "seconds_of",
]

#: Longest id, in bytes of UTF-8. Ids are kept for every tracked program.
MAX_ID_BYTES = 64 * 1024

#: A century: longer than any server runs, and exact as a float.
LONGEST_SECONDS = 3_155_760_000


def program_id_of(value: Any, field: str = "program_id") -> str:
    """``value`` as an id: text that is not empty and not too long, or an integer's decimals.

    Raises IdentityError naming ``field``.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise IdentityError(field, f"must be a string or an integer, not {_json_type(value)}")
    try:
        text = str(value)
        size = len(text.encode())
    except UnicodeEncodeError:
        raise IdentityError(field, "must be valid Unicode, not a lone surrogate") from None
    except ValueError:  # an integer with thousands of digits
        raise IdentityError(field, f"must have at most {MAX_ID_BYTES} bytes") from None
    if not text:
        raise IdentityError(field, "must not be empty")
    if size > MAX_ID_BYTES:
        raise IdentityError(field, f"must have at most {MAX_ID_BYTES} bytes, not {size}")
    return text


def boolean_of(value: Any, field: str) -> bool:
    """``value`` as true or false. Raises IdentityError naming ``field``."""
    # Numbers and text too: they are all that vllm_xargs and headers can carry.
    text = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if text in ("true", "1"):
        return True
    if text in ("false", "0"):
        return False
    raise IdentityError(field, "must be true or false")


def seconds_of(value: Any, field: str, *, zero: bool) -> float:
    """``value`` as a finite number of seconds; ``zero``: whether 0 is allowed.

    Raises IdentityError naming ``field``.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= LONGEST_SECONDS or (value == 0 and not zero):
        lowest = "from 0" if zero else "above 0 and up"
        raise IdentityError(field, f"must be a number of seconds {lowest} to {LONGEST_SECONDS}")
    return float(value)


def object_of(value: Any, field: str) -> dict[str, Any]:
    """``value`` as a JSON object. Raises IdentityError naming ``field``."""
    if not isinstance(value, dict):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        found = "a number" if number else _json_type(value)
        raise IdentityError(field, f"must be an object, not {found}")
    return value


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number with a fraction or exponent"
    return {list: "a list", dict: "an object", type(None): "null", str: "a string"}.get(
        type(value), type(value).__name__
    )
