def _cove():
    import linecache, os, sys

    code, name = sys.stdin.buffer.read().decode(), "<snippet>"  # to its end: the code itself finds an empty stdin
    if code.lstrip("\r\n")[:1] in (" ", "\t"):
        import textwrap

        code = textwrap.dedent(code)
    # What the caller did not set: the mark by which all that a run starts is found again, which children inherit still,
    # and what an interpreter without a locale sets for itself.
    getattr(os.environ, "_data", {}).pop(b"COVE_RUN", None)
    with open("/proc/self/environ", "rb") as given:
        if b"LC_CTYPE=" not in given.read():
            os.environ.pop("LC_CTYPE", None)

    def hook(kind, error, trace):
        while trace and trace.tb_frame.f_code.co_filename != name:  # ours
            trace = trace.tb_next
        import traceback

        traceback.print_exception(kind, error.with_traceback(trace), trace)

    sys.argv, sys.excepthook = [name], hook
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    return compile(code, name, "exec", dont_inherit=True)


exec((_cove(), globals().pop("_cove"))[0])
