"""A sandbox that ends by itself after a minute and a half."""

from cove.e2b import CodeInterpreter

sandbox = CodeInterpreter(timeout=90)
