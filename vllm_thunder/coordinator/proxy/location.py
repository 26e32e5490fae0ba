"""Where an engine sends a client on to: never to the engine itself, past the coordinator."""

from urllib.parse import urlsplit

from vllm_thunder.coordinator.proxy.pool import Origin

__all__ = ["location_for_client"]

_PORTS = {"http": 80, "https": 443}


def location_for_client(value: bytes, origin: Origin, root: str) -> bytes:
    """The value of ``Location``: where it is a place at the engine, the same at the coordinator.

    That is told as a path, since only the client knows by which name it has come. ``root``: where
    the coordinator is mounted, without a slash at the end.
    """
    text = value.decode("latin-1")
    try:
        parts = urlsplit(text)
        port = parts.port or _PORTS.get(parts.scheme, origin.port)
    except ValueError:
        return value
    if parts.netloc:
        named_alike = parts.netloc == origin.host_header.decode()
        if not named_alike and (parts.hostname, port) != (origin.host, origin.port):
            return value
        place = text.partition("//")[2][len(parts.netloc) :]
        place = place if place.startswith("/") else f"/{place}"
    elif text.startswith("/"):
        place = text
    else:  # it is relative to what was asked for, or no address of HTTP
        return value
    prefix = origin.prefix.decode()
    if prefix and place.startswith((f"{prefix}/", f"{prefix}?", f"{prefix}#")):
        place = place[len(prefix) :]
    elif prefix and place == prefix:
        place = "/"
    place = f"{root}{place if place.startswith('/') else f'/{place}'}"
    # What begins with two slashes, or what browsers take for such, would name another host.
    return (f"/.{place}" if place[1:2] in ("/", "\\") else place).encode("latin-1")
