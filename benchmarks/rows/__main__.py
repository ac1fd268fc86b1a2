"""Run one row and print its result as JSON: see `benchmarks.rows`."""

import json
import sys

from benchmarks.rows import ROWS

try:
    value, details = ROWS[sys.argv[1]].measure()
except ImportError as error:
    if (error.name or "").startswith("gdn"):
        raise
    print(json.dumps({"absent": str(error)}))
else:
    print(json.dumps({"value": value, "details": details}))
