"""`python -m models_check.one NAME`: sweep one name and print the finding as a line of JSON."""

from __future__ import annotations

import json
import sys

from .sweep import sweep

if __name__ == "__main__":
    print(json.dumps(sweep(sys.argv[1]).to_json()))
