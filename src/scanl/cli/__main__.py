import sys

from scanl.cli import main

sys.exit(main())
