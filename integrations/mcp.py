"""MCP: the tools of a server as function tools of a chat completion, through the official client.

A call that does not fit the tool's schema is the model's mistake and is told to it. An error that
the server reports is not: it ends the episode, unless ``tells_errors``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
from mcp import Client, Tool


class MCPToolError(RuntimeError):
    """A tool of the server failed, or returned what a text model cannot read."""


class MCPTools:
    """``schemas`` is what ``tools=`` of a request takes."""

    def __init__(self, server: Client, tools: Sequence[Tool], *, tells_errors: bool) -> None:
        self.schemas: list[dict[str, Any]] = [_schema(tool) for tool in tools]
        self._server = server
        self._tools = {tool.name: tool for tool in tools}
        self._tells_errors = tells_errors

    async def answer(self, message: Any) -> list[dict[str, Any]]:
        """The tool messages that answer the calls of a completion's message, in their order."""
        return [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": await self.call(call.function.name, call.function.arguments),
            }
            for call in message.tool_calls or []
        ]

    async def call(self, name: str, arguments: str) -> str:
        """The text of the result, or what is wrong with the call.

        Raises:
            MCPToolError: see the module.
        """
        if name not in self._tools:
            return f"Error: there is no tool {name}; there are {', '.join(self._tools)}"
        try:
            values = json.loads(arguments or "{}")
            jsonschema.validate(values, self._tools[name].input_schema)
        except (ValueError, jsonschema.ValidationError) as error:
            reason = error.message if isinstance(error, jsonschema.ValidationError) else error
            return f"Error: the arguments do not fit: {reason}"
        result = await self._server.call_tool(name, values)
        if unreadable := [part.type for part in result.content if part.type != "text"]:
            raise MCPToolError(f"the tool {name} returned {', '.join(unreadable)}, not text")
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error and not self._tells_errors:
            raise MCPToolError(f"the tool {name} failed: {text}")
        return text


@asynccontextmanager
async def mcp_tools(server: Any, *, tells_errors: bool = False) -> AsyncIterator[MCPTools]:
    """Connect to a server for the length of the block.

    ``server`` is what ``mcp.Client`` takes: a URL, ``StdioServerParameters``, or a server object.
    """
    try:
        async with Client(server) as client:
            page = await client.list_tools()
            tools = list(page.tools)
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            yield MCPTools(client, tools, tells_errors=tells_errors)
    except BaseExceptionGroup as group:  # the task groups of the client wrap what the block raises
        raise _unwrapped(group) from None


def _unwrapped(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _schema(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}
