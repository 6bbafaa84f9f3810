"""agno: E2BTools, the functions that an agent is given, called one after the other."""

import json

from agno.tools.e2b import E2BTools

from steps import Steps, holds, same

step = Steps("agno")
tools = E2BTools(sandbox_options={"metadata": {"trial": "agno"}})
try:
    with step("run_python_code"):
        holds(tools.run_python_code("x = 6\nx * 7"), "42")
        holds(tools.run_python_code("1 / 0"), "ZeroDivisionError")
    with step("download_png_result"):
        tools.run_python_code("import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.show()")
        got = tools.download_png_result(None, output_path="plot.png")
        same(len(got.images or []), 1)
        same(open("plot.png", "rb").read(4), b"\x89PNG")
    with step("download_chart_data", fault="agno calls .get of the SDK's chart object, which is no dict"):
        got = tools.download_chart_data(None, output_path="chart.json")
        holds(got.content, "Interactive bar chart")
    with step("write_file_content, read_file_content, list_files"):
        same(tools.write_file_content("/home/user/note.txt", "hello"), "/home/user/note.txt")
        same(tools.read_file_content("/home/user/note.txt"), "hello")
        holds(tools.list_files("/home/user"), "note.txt")
    with step("upload_file"):
        with open("local.txt", "w") as f:
            f.write("from here")
        same(tools.upload_file("local.txt"), "/home/user/local.txt")
    with step("download_file_from_sandbox", fault="agno opens the file for bytes and writes the SDK's str"):
        same(tools.download_file_from_sandbox("/home/user/local.txt", "back.txt"), "back.txt")
    with step("run_command, stream_command"):
        holds(tools.run_command("echo out; echo err >&2"), "err")
        holds(tools.stream_command("for i in 1 2; do echo $i; done"), "2")
    with step("run_background_command, kill_background_command"):
        command = tools.run_background_command("sleep 100")
        holds(tools.kill_background_command(command), "terminated")
    with step("watch_directory", fault="agno calls get_change, which the SDK's watcher does not have"):
        same(json.loads(tools.watch_directory("/home/user", duration_seconds=1))["status"], "success")
    with step("get_public_url"):
        holds(tools.get_public_url(8000), tools.sandbox.sandbox_id)
    with step("set_sandbox_timeout"):
        same(tools.set_sandbox_timeout(120), "120")
    with step("get_sandbox_status", fault="agno reads the attribute id, which the SDK calls sandbox_id"):
        same(tools.get_sandbox_status(), tools.sandbox.sandbox_id)
    with step("list_running_sandboxes", fault="agno iterates the SDK's paginator"):
        holds(tools.list_running_sandboxes(), tools.sandbox.sandbox_id)
finally:
    with step("shutdown_sandbox"):
        same(json.loads(tools.shutdown_sandbox())["content"], True)
