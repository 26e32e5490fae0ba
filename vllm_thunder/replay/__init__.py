"""Replays agent runs against a server and measures: traces, client, tiny model, reports.

It talks HTTP only and knows nothing of the engine, so that stock vLLM and other systems are
measured by the same code.
"""
