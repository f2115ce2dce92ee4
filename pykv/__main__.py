"""``python -m pykv``: what the console script ``pykv`` does."""

import sys

from pykv._cli.main import main

sys.exit(main())
