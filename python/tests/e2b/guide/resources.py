"""The defaults are for small work; longer work asks for a longer life."""

from cove.e2b import CodeInterpreter

small, long = CodeInterpreter(), CodeInterpreter(timeout=600)
