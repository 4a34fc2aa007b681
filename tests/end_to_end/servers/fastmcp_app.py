"""The echo tools on FastMCP's own server: the oracle for what MCP clients do. Usage: fastmcp_app.py PORT"""

import sys
from typing import Any

from fastmcp import FastMCP
from starlette.requests import Request
from starlette.responses import JSONResponse

server = FastMCP("echo")


@server.tool
def echo_message(message: str) -> str:
    """Say the message back."""
    return message


@server.tool
def echo_with_length(message: str) -> dict[str, Any]:
    """Say the message back, with its length."""
    return {"message": message, "length": len(message)}


@server.custom_route("/health", methods=["GET"])
async def health(request: Request) -> JSONResponse:
    return JSONResponse({"status": "healthy"})


if __name__ == "__main__":
    server.run("http", host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", show_banner=False)
