"""``python -m pykv info | check | bench``."""

import sys

from pykv._cli.main import main

sys.exit(main())
