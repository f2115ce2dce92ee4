"""The command line, ``pykv`` or ``python -m pykv``, and what it works with; nothing of it is imported by the package.

``samples`` are calls of every operation, ``expected`` their results, ``timing`` says how long calls take.
"""
