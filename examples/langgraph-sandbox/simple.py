"""Runs the example of this name, which the package brings: read it there and copy it."""

from cove.langgraph_sandbox.usage_examples.simple_sandbox import main

main()
