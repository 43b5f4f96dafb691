"""Run commands in one Spark application: each line of the file that is named is the arguments of one.

spark-submit starts it. A command's exit code is a line on stdout, which spark-submit joins with stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cli.main import main
from pyspark_mirror import session

session()
with Path(sys.argv[1]).open() as lines:
    for line in lines:
        sys.argv[1:] = json.loads(line)
        try:
            main()
        except SystemExit as ended:
            sys.stdout.write(f"ended: {ended.code or 0}\n")
            sys.stdout.flush()
