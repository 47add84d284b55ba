"""A prompt that equals a cached sequence ends the generation thread. Usage: exact_hit.py [MODEL]"""

import json
import subprocess
import sys
import time
from urllib.request import urlopen

MODEL = sys.argv[1] if len(sys.argv) > 1 else "mlx-community/SmolLM2-135M-Instruct"
URL = "http://127.0.0.1:8765"
command = [sys.executable, "-m", "mlx_lm", "server", "--model", MODEL, "--port", "8765"]


def ask(path, **body):
    try:
        with urlopen(URL + path, json.dumps(body).encode() if body else None, timeout=20) as reply:
            return json.load(reply).get("choices", [{}])[0].get("text", "ok")
    except Exception as error:
        return f"failed: {error!r}"


with subprocess.Popen(command) as server:
    while "failed" in ask("/health"):
        time.sleep(1)
    first = ask("/v1/completions", prompt="Once upon a time", max_tokens=8)
    again = ask("/v1/completions", prompt="Once upon a time" + first, max_tokens=8)
    other = ask("/v1/completions", prompt="The lock-keeper", max_tokens=8)
    print(f"first: {first!r}\ncontinued: {again!r}\nanother prompt: {other!r}")
    server.kill()
