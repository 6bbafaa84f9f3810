"""BIND_LOCAL: datasets of the server's host, read-only, and a session that leaves its log on this host.

DATASETS_HOST_RO names the directory with the datasets; the server's operator allows it in storage.host_paths.
"""

from __future__ import annotations

from ...testing import last_tool_text, tool_call
from .. import Config, DatasetAccess, SessionManager, SessionStorage, make_code_sandbox_tool, make_list_datasets_tool
from ..datasets import discover
from .conversation import arguments, converse, new_key

QUESTIONS = ["Which datasets are there?", "How many rows has the first, and can you draw it?"]
CODE = """
import glob, pandas as pd, matplotlib.pyplot as plt
path = sorted(glob.glob('/data/*'))[0]
df = pd.read_parquet(path) if path.endswith('.parquet') else pd.read_csv(path)
df.plot()
plt.savefig('/session/artifacts/plot.png')
print(len(df), 'rows in', path)
"""
SCRIPT = [
    tool_call("list_datasets"),
    lambda messages: f"These:\n{last_tool_text(messages)}",
    tool_call("code_sandbox", code=CODE),
    lambda messages: f"There are {last_tool_text(messages).splitlines()[0]}, and the plot is saved.",
]


def main() -> None:
    args = arguments(__doc__ or "")
    config = Config.from_env()
    if config.datasets_host_ro is None:
        raise SystemExit("DATASETS_HOST_RO is not set: name the directory with the datasets, on the server's host")
    print("Datasets:", ", ".join(discover(config.datasets_host_ro, "")))
    manager = SessionManager(image=config.sandbox_image, session_storage=SessionStorage.BIND, dataset_access=DatasetAccess.LOCAL_RO,
                             datasets_path=config.datasets_host_ro, session_root=config.sessions_root)
    key = new_key()
    tools = [make_code_sandbox_tool(session_manager=manager, session_key_fn=lambda: key, timeout_s=60),
             make_list_datasets_tool(session_manager=manager, session_key_fn=lambda: key)]
    converse(manager, key, tools, "Analyse the datasets in /data with code_sandbox.", QUESTIONS, SCRIPT, args)
    print(f"The session's log: {manager.get_session_dir(key) / 'session.log'}")


if __name__ == "__main__":
    main()
