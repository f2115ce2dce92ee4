"""The command line, ``pykv`` or ``python -m pykv``; nothing of it is imported by the package."""
