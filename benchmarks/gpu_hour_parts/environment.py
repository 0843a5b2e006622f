"""What the machine is: devices, driver, versions, links."""

from __future__ import annotations

import shutil
import subprocess

from gpu_hour_parts.settings import Context, Row, Settings
from shardwise.bench.machine import describe

COMMANDS = {
    "driver": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"],
    "links": ["nvidia-smi", "topo", "-m"],
}


def items(settings: Settings) -> list[str]:
    return ["torch", *COMMANDS]


def run(item: str, context: Context) -> Row:
    if item == "torch":
        facts = context.device.facts()
        devices = facts.get("devices", [])
        found = f"{len(devices)} x {devices[0]['name']}" if devices else facts["kind"]
        machine = describe()
        return {"found": f"{found}, torch {machine['torch']}", "facts": facts, "machine": machine}
    command = COMMANDS[item]
    if shutil.which(command[0]) is None:
        return {"state": "skipped", "why": f"{command[0]} is not installed"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[:300]}")
    return {"found": done.stdout.splitlines()[-1].strip(), "text": done.stdout}
