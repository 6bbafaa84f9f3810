"""A sandbox per conversation for LangGraph agents: the names and the behaviour of the langgraph_sandbox package, on a Cove server."""

from .config import Config, DatasetAccess, SessionStorage
from .sandbox import SessionManager
from .tool_factory import make_code_sandbox_tool, make_export_datasets_tool, make_list_datasets_tool, make_select_dataset_tool

__all__ = ["Config", "DatasetAccess", "SessionManager", "SessionStorage", "make_code_sandbox_tool", "make_export_datasets_tool",
           "make_list_datasets_tool", "make_select_dataset_tool"]
