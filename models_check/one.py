"""`python -m models_check.one NAME [unknown]`: test one model, print the finding as JSON."""

from __future__ import annotations

import json
import sys

from .sweep import sweep

if __name__ == "__main__":
    print(json.dumps(sweep(sys.argv[1], unknown="unknown" in sys.argv[2:]).to_json()))
