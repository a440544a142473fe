import sys

from residua.cli import main

sys.exit(main())
