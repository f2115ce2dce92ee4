"""``python -m pykv``: what the console script ``pykv`` does."""

import sys

from pykv._tools.main import main

sys.exit(main())
