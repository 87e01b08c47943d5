"""`python -m wgattn`: the same as the command `wgattn`."""

import sys

from .cli import main

sys.exit(main())
