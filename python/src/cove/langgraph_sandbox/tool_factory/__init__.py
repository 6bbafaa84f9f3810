"""Tools for agents: run code, and select, list and export datasets."""

from .make_tools import make_code_sandbox_tool, make_export_datasets_tool, make_list_datasets_tool, make_select_dataset_tool

__all__ = ["make_code_sandbox_tool", "make_export_datasets_tool", "make_list_datasets_tool", "make_select_dataset_tool"]
