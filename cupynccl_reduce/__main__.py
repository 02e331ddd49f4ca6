"""`python -m cupynccl_reduce`: the command line."""

import sys

from .cli import main

sys.exit(main())
