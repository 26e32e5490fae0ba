"""Several engines under one load, by who chooses the engine: see ``python -m benchmarks.fleet -h``.

- ``load``: the programs, with skewed lengths
- ``routers``: who else chooses an engine, without a coordinator
- ``client``: carries a replay's calls to several servers
- ``watch``: how evenly the engines' memory is used meanwhile
- ``rows``: what is measured and which bars it has to clear
- ``session``: takes the measurements, one after the other, and never one twice
"""
