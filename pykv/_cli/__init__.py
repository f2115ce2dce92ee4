"""The command line, ``python -m pykv``; nothing of it is imported by the package."""
