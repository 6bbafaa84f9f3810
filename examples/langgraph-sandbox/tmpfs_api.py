"""Runs the example of this name, which the package brings: read it there and copy it."""

from cove.langgraph_sandbox.usage_examples.tmpfs_api import main

main()
