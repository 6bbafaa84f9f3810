"""python -m cove.setup"""

import sys

from . import main

sys.exit(main())
