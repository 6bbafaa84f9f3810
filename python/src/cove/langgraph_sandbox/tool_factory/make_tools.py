"""The factories. Each makes a tool that works in sync and async graphs and answers with a message that matches its call."""

# Annotations are evaluated here, and not later from text: LangChain would compile that text again in every call.

import json
from collections.abc import Callable
from typing import Annotated, Any

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolCallId
from langgraph.prebuilt import ToolRuntime
from langgraph.types import Command
from pydantic import BaseModel, Field

from ..._wire import Result
from ...checkpoint import abefore_use, before_use
from ...errors import CoveError, Timeout, Unavailable, Unreachable
from .._steps import Work, adrive, drive
from ..config import DatasetAccess
from ..sandbox import SessionManager
from .call import ToolCall
from .tool import SandboxTool

# What a message tells of each stream at most; all of it is in the session's log.
MAX_OUTPUT = 20_000

CODE_DESCRIPTION = (
    "Run Python code in this conversation's sandbox. Variables, imports and files stay between calls. Output that is printed and the value "
    "of the last expression come back. Save files worth keeping to /session/artifacts/; the working directory is /session.")
SELECT_DESCRIPTION = "Load a dataset by its id into the sandbox. The answer tells the path under which code can read it."
EXPORT_DESCRIPTION = "Export a file of the sandbox, such as /session/data/NAME, to the user's machine, with a link to download it."
LIST_DESCRIPTION = "List the dataset files that code in the sandbox can read, with path, size and modification time."

Job = Callable[..., Work[Command[Any]]]


class CodeInput(BaseModel):
    code: str = Field(description="Python code to run")


class SelectInput(BaseModel):
    dataset_id: str = Field(description="id of the dataset")


class ExportInput(BaseModel):
    container_path: str = Field(description="path of the file in the sandbox, such as /session/data/result.parquet")


class NoInput(BaseModel):
    # The model sees no field. A schema that has none at all would have nothing injected.
    tool_call_id: Annotated[str, InjectedToolCallId]


def make_code_sandbox_tool(*, session_manager: SessionManager, session_key_fn: Callable[..., Any] | None = None, name: str = "code_sandbox",
                           description: str = CODE_DESCRIPTION, timeout_s: float = 30, images: bool = True) -> BaseTool:
    """A tool that runs code in the session of the conversation.

    The session's key comes from session_key_fn, which takes nothing, the RunnableConfig or the ToolRuntime; without it the
    thread_id is the key, and outside a thread "conv". Other tools of the manager without a function of their own use this one's.
    With images, figures that code shows come back as image blocks after the text.
    """
    if session_key_fn is not None and session_manager.session_key_fn is None:
        session_manager.session_key_fn = session_key_fn

    def job(call: ToolCall, code: str) -> Work[Command[Any]]:
        key = yield from call.session_key(session_manager, session_key_fn)
        try:
            result = yield from session_manager.running(
                key, code, timeout_s, tool_call=call.id, idempotency_key=call.idempotency_key(), on_event=call.teller())
        except CoveError as err:  # the agent goes on and can tell its user
            unknown = isinstance(err, Unavailable | Timeout) and not isinstance(err, Unreachable)
            return call.answer(f"{'It is not known whether the code ran' if unknown else 'The code was not run'}: {_sentence(err)}", [], ok=False)
        text = _code_text(result)
        shown = _images(result["results"]) if images else []
        return call.answer([{"type": "text", "text": text}, *shown] if shown else text, result["artifacts"], result["ok"])

    return _tool(session_manager, job, name, description, CodeInput, {"ls_code_input_language": "python"})


def _code_text(result: dict[str, Any]) -> str:
    """What the model reads: output, files, and all of it once more as JSON."""
    stdout = _cut(result["stdout"])
    stderr = _cut("\n".join(filter(None, [result["stderr"].rstrip("\n"), result.get("error", "")])))
    payload = {"stdout": stdout, "stderr": stderr, "session_dir": result["session_dir"], "ok": result["ok"]}
    payload |= {k: result[k] for k in ("result", "note") if result.get(k)}
    return "\n\n".join(filter(None, [stdout.rstrip("\n"), _artifact_text(result["artifacts"]), json.dumps(payload, indent=2, ensure_ascii=False)]))


def _cut(text: str) -> str:
    """The beginning and the end of a long text: errors tend to be last."""
    if len(text) <= MAX_OUTPUT:
        return text
    half = MAX_OUTPUT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _artifact_text(artifacts: list[dict[str, Any]]) -> str:
    if not artifacts:
        return ""
    lines = ["Generated Artifacts:"]
    for a in artifacts:
        lines.append(f"- {a['path'] or a['name']} ({', '.join(filter(None, [a['mime'], str(a['size']) + ' bytes']))})")
        lines.append(f"  Not kept: {a['error']}" if a.get("error") else f"  Download: {a.get('url', '')}")
    return "\n".join(lines)


def _images(results: list[Result]) -> list[dict[str, str]]:
    kinds = ("image/png", "image/jpeg")
    return [{"type": "image", "base64": r.data[kind].replace("\n", ""), "mime_type": kind}
            for r in results for kind in kinds if isinstance(r.data.get(kind), str)]


def make_select_dataset_tool(*, session_manager: SessionManager, fetch_fn: Callable[..., Any], session_key_fn: Callable[..., Any] | None = None,
                             client: Any = None, name: str = "select_dataset", description: str = SELECT_DESCRIPTION) -> BaseTool:
    """A tool that fetches a dataset with fetch_fn(dataset_id), or fetch_fn(client, dataset_id) when a client is given, and stages it.

    fetch_fn may be sync or async and returns bytes, an open file, or pieces of bytes; a dataset that is loaded is not fetched again.
    """

    def job(call: ToolCall, dataset_id: str) -> Work[Command[Any]]:
        args = (dataset_id,) if client is None else (client, dataset_id)
        try:
            key = yield from call.session_key(session_manager, session_key_fn)
            staged = yield from session_manager.staging(key, dataset_id, fetch_fn, *args)
        except Exception as err:  # whatever fetch_fn raises is the model's to know
            return call.answer(f"Failed to load dataset '{dataset_id}': {_sentence(err)}", ok=False)
        artifact = {"id": staged.id, "path": staged.path, "size": staged.size, "sha256": staged.sha256}
        return call.answer(f"Dataset '{dataset_id}' is loaded. Code can read it at {staged.path} ({staged.size} bytes).", artifact)

    return _tool(session_manager, job, name, description, SelectInput)


def make_export_datasets_tool(*, session_manager: SessionManager, session_key_fn: Callable[..., Any] | None = None,
                              name: str = "export_datasets", description: str = EXPORT_DESCRIPTION) -> BaseTool:
    """A tool that copies a file out of the sandbox to exports/modified_datasets/, under a name that nothing else has."""

    def job(call: ToolCall, container_path: str) -> Work[Command[Any]]:
        try:
            key = yield from call.session_key(session_manager, session_key_fn)
            exported = yield from session_manager.exporting(key, container_path)
        except (CoveError, RuntimeError, ValueError, OSError) as err:
            return call.answer(f"Failed to export '{container_path}': {_sentence(err)}", ok=False)
        artifact = exported["artifact"]
        link = f"Download URL: {artifact['url']}" if artifact.get("url") else f"No download URL: {artifact.get('error', '')}"
        text = f"Exported.\nContainer path: {exported['container_path']}\nHost path: {exported['host_path']}\n{link}"
        return call.answer(text, [artifact])

    return _tool(session_manager, job, name, description, ExportInput)


_MODES = {DatasetAccess.API: "API mode", DatasetAccess.LOCAL_RO: "LOCAL_RO mode"}


def make_list_datasets_tool(*, session_manager: SessionManager, session_key_fn: Callable[..., Any] | None = None,
                            name: str = "list_datasets", description: str = LIST_DESCRIPTION) -> BaseTool:
    """A tool that lists the files of /session/data (API) or /data (LOCAL_RO). It runs no code."""

    def job(call: ToolCall) -> Work[Command[Any]]:
        mode = session_manager.dataset_access
        if mode is DatasetAccess.NONE:
            return call.answer("No datasets available - sandbox is in NONE mode")
        try:
            key = yield from call.session_key(session_manager, session_key_fn)
            files = yield from session_manager.listing(key)
        except (CoveError, RuntimeError, ValueError) as err:
            return call.answer(f"Failed to list datasets: {_sentence(err)}", ok=False)
        told = {"mode": mode.value, "path": session_manager.datasets_dir, "files": files, "count": sum("size" in f for f in files)}
        return call.answer(f"Datasets in {_MODES[mode]}:\n{json.dumps(told, indent=2)}", told)

    return _tool(session_manager, job, name, description, NoInput)


def _sentence(err: Exception) -> str:
    """An error for a model: what it says, or its name when it says nothing."""
    return str(err) or type(err).__name__


def _tool(manager: SessionManager, job: Job, name: str, description: str, schema: type[BaseModel], metadata: dict[str, Any] | None = None) -> BaseTool:
    """A tool of a job, for threads and for event loops. The model sees the schema's fields, the graph fills in the rest."""

    def run(config: RunnableConfig, tool_call_id: Annotated[str, InjectedToolCallId], runtime: ToolRuntime = None, **args: Any) -> Any:  # type: ignore[assignment]
        call = ToolCall(name, tool_call_id, config, runtime)
        with call.span():
            before_use(config)
            return drive(manager.cove, job(call, **args))

    async def arun(config: RunnableConfig, tool_call_id: Annotated[str, InjectedToolCallId], runtime: ToolRuntime = None, **args: Any) -> Any:  # type: ignore[assignment]
        call = ToolCall(name, tool_call_id, config, runtime)
        with call.span():
            await abefore_use(config)
            return await adrive(manager.async_cove, job(call, **args))

    return SandboxTool.from_function(func=run, coroutine=arun, name=name, description=description, args_schema=schema, metadata=metadata)
