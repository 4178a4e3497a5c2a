"""python -m kvpack: the command line."""

import sys

from kvpack.cli import main

sys.exit(main())
