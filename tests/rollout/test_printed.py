"""What a child prints: in lines, bounded, and read to the end whatever is shown."""

from __future__ import annotations

import asyncio

import pytest

from agent_rl.rollout.printed import Printed


async def shown(*chunks: bytes, max_shown: int = 100) -> tuple[list[str], str]:
    """The lines that are shown of these chunks, and the end that is kept."""
    lines: list[str] = []
    stream = asyncio.StreamReader()
    printed = Printed(stream, "A", show=lines.append, max_shown=max_shown)
    for chunk in chunks:
        stream.feed_data(chunk)
        await asyncio.sleep(0)
    stream.feed_eof()
    await printed.ended(60.0)
    assert stream.at_eof()
    return lines, printed.tail


async def test_lines_come_whole_after_the_name() -> None:
    text = "größer\n".encode()
    lines, tail = await shown(b"one\ntw", b"o\n\n", text[:3], text[3:], b"no end")
    assert lines == ["[A] one\n", "[A] two\n", "[A] größer\n", "[A] no end\n"]
    assert tail == "one\ntwo\n\ngrößer\nno end"


@pytest.mark.parametrize("chunks", [(b"1234\n6789\n", b"lost\n"), (b"1234\n6789\nlost\n",)])
async def test_no_more_than_so_much_is_shown(chunks: tuple[bytes, ...]) -> None:
    lines, tail = await shown(*chunks, max_shown=7)
    assert lines[:2] == ["[A] 1234\n", "[A] 67\n"]
    assert lines[2:] == ["[A] ... more than 7 bytes in one episode: the rest is not shown\n"]
    assert tail == "1234\n6789\nlost\n"


async def test_a_line_without_end_is_shown_once_its_bytes_are_full() -> None:
    lines, tail = await shown(*[b"z" * 1000] * 20, max_shown=3000)
    assert lines[0] == f"[A] {'z' * 3000}\n" and len(lines) == 2
    assert tail == "z" * 8192


async def test_a_pipe_that_stays_open_is_not_waited_for() -> None:
    stream = asyncio.StreamReader()
    printed = Printed(stream, "A", show=lambda text: None)
    stream.feed_data(b"last words")
    await printed.ended(0.0)
    for _ in range(10):
        await asyncio.sleep(0)
    printed.cancel()
    assert printed.tail == "last words"
