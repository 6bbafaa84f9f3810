"""Cove gives AI agents a computer: this is its client, with tools for LangChain, LangGraph and deepagents in submodules."""

from ._wire import (
    ArtifactDataset,
    ArtifactInfo,
    Checkpoint,
    CodeError,
    Dataset,
    Entry,
    Event,
    Limits,
    Lineage,
    Link,
    Network,
    NotCopied,
    Output,
    Result,
    RunLimits,
    RunUsage,
    SandboxInfo,
    SandboxUsage,
    SessionDatasets,
    SessionInfo,
    SessionLoss,
    SessionState,
    SessionVariable,
    SnippetResult,
    TemplateInfo,
)
from .aio import AsyncArtifact, AsyncCove, AsyncSandbox, AsyncSession, AsyncSessionOutput
from .client import Artifact, Cove, Sandbox, Session, SessionOutput
from .errors import (
    Conflict,
    CoveError,
    Denied,
    DiskFull,
    Exhausted,
    Gone,
    Invalid,
    NotFound,
    Timeout,
    Unauthorized,
    Unavailable,
    Unsupported,
)

__version__ = "0.1.0"

__all__ = [
    "Artifact", "ArtifactDataset", "ArtifactInfo", "AsyncArtifact", "AsyncCove", "AsyncSandbox", "AsyncSession", "AsyncSessionOutput",
    "Checkpoint", "CodeError", "Conflict", "Cove", "CoveError", "Dataset", "Denied", "DiskFull", "Entry", "Event", "Exhausted", "Gone", "Invalid",
    "Limits", "Lineage", "Link", "Network", "NotCopied", "NotFound", "Output", "Result", "RunLimits", "RunUsage", "Sandbox", "SandboxInfo",
    "SandboxUsage", "Session", "SessionDatasets", "SessionInfo", "SessionLoss", "SessionOutput", "SessionState", "SessionVariable",
    "SnippetResult", "TemplateInfo", "Timeout", "Unauthorized", "Unavailable", "Unsupported",
]
