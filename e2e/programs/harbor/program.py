"""harbor: its environments for E2B and for OpenSandbox, with the same steps of a task's life."""

import asyncio
import os
import tempfile
from pathlib import Path

from harbor.environments.e2b import E2BEnvironment
from harbor.environments.opensandbox import OpenSandboxEnvironment
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from steps import Steps, same

step = Steps("harbor")
REGISTRY = os.environ["PROGRAM_REGISTRY"]


def environment(make, name, dockerfile=None, **kwargs):
    work = Path(tempfile.mkdtemp(dir="."))
    (work / "environment").mkdir()
    config = EnvironmentConfig(env={"GIVEN": "yes"}, cpus=1, memory_mb=512)
    if dockerfile:
        (work / "environment" / "Dockerfile").write_text(dockerfile)
        (work / "environment" / "given.txt").write_text("given")
    else:
        config.docker_image = f"{REGISTRY}/bash:1"
    trial = TrialPaths(trial_dir=work / "trial")
    return make(environment_dir=work / "environment", environment_name=name, session_id=f"{name}__trial", trial_paths=trial,
                task_env_config=config, persistent_env={"GIVEN": "yes"}, **kwargs)


async def tried(kind, task):
    with step(f"{kind}: start"):
        await task.start(force_build=False)
    with step(f"{kind}: exec"):
        got = await task.exec("echo out; echo err >&2; echo $GIVEN; pwd; exit 3", cwd="/tmp")
        same((got.return_code, got.stdout, got.stderr), (3, "out\nyes\n/tmp\n", "err\n"))
    with step(f"{kind}: exec as root"):
        same((await task.exec("id -u", user="root")).stdout.strip(), "0")
    with step(f"{kind}: upload_file, download_file"):
        Path("local.bin").write_bytes(bytes(range(256)) * 1000)
        await task.upload_file("local.bin", "/tmp/up/local.bin")
        await task.download_file("/tmp/up/local.bin", "back.bin")
        same(Path("back.bin").read_bytes() == Path("local.bin").read_bytes(), True)
    with step(f"{kind}: upload_dir, download_dir"):
        Path("tree/deep").mkdir(parents=True, exist_ok=True)
        Path("tree/deep/a.txt").write_text("a")
        await task.upload_dir("tree", "/tmp/tree")
        await task.download_dir("/tmp/tree", f"back-{kind}")
        same(Path(f"back-{kind}/deep/a.txt").read_text(), "a")
    with step(f"{kind}: is_dir, is_file"):
        same((await task.is_dir("/tmp/tree"), await task.is_file("/tmp/tree")), (True, False))
    with step(f"{kind}: stop"):
        await task.stop(delete=True)


async def main():
    await tried("E2B of an image", environment(E2BEnvironment, "image"))
    dockerfile = f"FROM {REGISTRY}/bash:1\nWORKDIR /app\nCOPY given.txt /app/given.txt\nRUN echo built > /app/built.txt\n"
    built = environment(E2BEnvironment, "built", dockerfile)
    with step("E2B of a Dockerfile: start"):
        await built.start(force_build=True)
    with step("E2B of a Dockerfile: its files and its working directory"):
        same((await built.exec("cat given.txt built.txt")).stdout, "givenbuilt\n")
    with step("E2B of a Dockerfile: stop"):
        await built.stop(delete=True)
    await tried("OpenSandbox", environment(OpenSandboxEnvironment, "opensandbox", domain=os.environ["OPEN_SANDBOX_DOMAIN"],
                                           api_key=os.environ["OPEN_SANDBOX_API_KEY"], protocol="http"))


asyncio.run(main())
