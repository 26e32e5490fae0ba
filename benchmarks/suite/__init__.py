"""Everything that the project claims, measured in one run: see ``python -m benchmarks.suite -h``.

- ``rows``: what is measured and which bars it has to clear
- ``bars``: how a bar is judged
- ``session``: takes the measurements, one after the other, and never one twice
- ``facts``: what no replay tells
"""
