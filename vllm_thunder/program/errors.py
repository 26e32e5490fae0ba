"""Every error that vllm_thunder raises on purpose.

ThunderError
├── IdentityError     a request names its program in a way that cannot be used (HTTP 400)
├── ConfigError       a flag or setting has a value that is not allowed
├── PatchError        vLLM cannot be patched: another version, a changed file, too late
└── IntegrityError    the books of programs and blocks disagree with the block pool
"""

__all__ = ["ConfigError", "IdentityError", "IntegrityError", "PatchError", "ThunderError"]


class ThunderError(Exception):
    """Base of all errors below."""


class IdentityError(ThunderError):
    """A field that names a program has a wrong type or value.

    ``field`` is the request field or header as the client wrote it.
    """

    def __init__(self, field: str, problem: str):
        super().__init__(f"{field}: {problem}")
        self.field = field


class ConfigError(ThunderError):
    """A setting is out of its range; the message names the flag and the range."""


class PatchError(ThunderError):
    """vLLM cannot be patched; the message names the file and what differs."""


class IntegrityError(ThunderError):
    """Conservation of blocks or turns is broken; the message lists what disagrees."""
