from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("mcp.server", reason="needs pip install -e '.[mcp]'")
if not hasattr(pytest.importorskip("mcp"), "Client"):
    pytest.skip("needs mcp 2.0 or newer", allow_module_level=True)

from mcp import StdioServerParameters
from mcp.server import MCPServer
from mcp_agent import MCPClerk
from mcp_types import ImageContent
from scenario import Stage, call_of, check_conversation, check_individual, usual_replies
from shop import price

from agent_rl.integrations.mcp import MCPToolError, mcp_tools

STDIO_SERVER = """
from mcp.server import MCPServer
server = MCPServer("counter")

@server.tool()
def count(text: str) -> int:
    "Characters of a text."
    return len(text)

server.run()
"""


def test_the_example() -> None:
    check_conversation(MCPClerk)
    check_individual(MCPClerk)


def test_an_exception_in_the_server_ends_the_episode() -> None:
    stage = Stage({"gold": [call_of("gold")] * 8, "corn": usual_replies("corn")})
    stage.play(MCPClerk)
    assert stage.groups["gold"] is None and stage.groups["corn"] is not None
    assert stage.stats["rollout/failed/agent"] == 0.5
    assert isinstance(stage.errors["gold"], MCPToolError)


@pytest.fixture
def server() -> Any:
    server = MCPServer("shop")
    server.tool()(price)

    @server.tool()
    def picture() -> ImageContent:
        return ImageContent(type="image", data="AAAA", mime_type="image/png")

    return server


async def test_calls(server: Any) -> None:
    async with mcp_tools(server) as tools:
        first = tools.schemas[0]["function"]
        assert (first["name"], first["parameters"]["required"]) == ("price", ["item"])
        assert await tools.call("price", '{"item": "corn"}') == "42"
        assert await tools.call("size", "{}") == "Error: there is no tool size; there are " + (
            "price, picture"
        )
        for arguments in ("{", "[]", '{"item": 1}', "{}"):
            assert (await tools.call("price", arguments)).startswith("Error: the arguments do not")
        with pytest.raises(MCPToolError, match="the tool price failed"):
            await tools.call("price", '{"item": "gold"}')
        with pytest.raises(MCPToolError, match="returned image"):
            await tools.call("picture", "")


async def test_errors_that_are_told(server: Any) -> None:
    async with mcp_tools(server, tells_errors=True) as tools:
        assert "Error executing tool price" in await tools.call("price", '{"item": "gold"}')


async def test_a_server_in_a_process_of_its_own() -> None:
    command = StdioServerParameters(command=sys.executable, args=["-c", STDIO_SERVER])
    async with mcp_tools(command) as tools:
        assert await tools.call("count", '{"text": "corn"}') == "4"
