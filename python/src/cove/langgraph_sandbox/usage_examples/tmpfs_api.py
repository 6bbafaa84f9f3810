"""TMPFS_API: datasets that a client of an API fetches when the agent selects them, and nothing on disk.

The API of this example is a table in memory; CatalogClient is where yours goes.
"""

from __future__ import annotations

from langchain_core.tools import tool

from ...testing import last_tool_text, tool_call
from .. import Config, DatasetAccess, SessionManager, SessionStorage
from .. import make_code_sandbox_tool, make_export_datasets_tool, make_list_datasets_tool, make_select_dataset_tool
from .conversation import arguments, converse, new_key

QUESTIONS = ["Load the cities and tell me how many people live there.", "Add the density and export it."]
SCRIPT = [
    tool_call("list_catalog"),
    tool_call("select_dataset", dataset_id="cities.csv"),
    tool_call("code_sandbox", code="import pandas as pd\ndf = pd.read_csv('/session/data/cities.csv')\nprint(df.people.sum())"),
    lambda messages: f"{last_tool_text(messages).splitlines()[0]} people.",
    tool_call("code_sandbox", code="df['density'] = df.people / df.km2\ndf.to_csv('/session/data/density.csv', index=False)"),
    tool_call("export_datasets", container_path="/session/data/density.csv"),
    lambda messages: last_tool_text(messages),
]


class CatalogClient:
    """An API with two datasets."""

    tables = {"cities.csv": "name,people,km2\nBologna,390000,141\nFerrara,130000,405\n", "rivers.csv": "name,km\nReno,212\nPo,652\n"}

    def names(self) -> list[str]:
        return sorted(self.tables)

    def fetch(self, dataset_id: str) -> bytes:
        if dataset_id not in self.tables:
            raise LookupError(f"the catalog has {', '.join(self.names())}")
        return self.tables[dataset_id].encode()


def main() -> None:
    args = arguments(__doc__ or "")
    config = Config.from_env()
    manager = SessionManager(image=config.sandbox_image, session_storage=SessionStorage.TMPFS, dataset_access=DatasetAccess.API, tmpfs_size=512)
    client, key = CatalogClient(), new_key()

    @tool
    def list_catalog() -> str:
        """List the ids of the datasets that can be selected."""
        return ", ".join(client.names())

    def fetch(api: CatalogClient, dataset_id: str) -> bytes:
        return api.fetch(dataset_id)

    tools = [list_catalog, make_select_dataset_tool(session_manager=manager, session_key_fn=lambda: key, fetch_fn=fetch, client=client)]
    tools += [make(session_manager=manager, session_key_fn=lambda: key)
              for make in (make_code_sandbox_tool, make_list_datasets_tool, make_export_datasets_tool)]
    converse(manager, key, tools, "Select a dataset of the catalog before code uses it.", QUESTIONS, SCRIPT, args)


if __name__ == "__main__":
    main()
