"""`paddock view`: the page over the store."""

from __future__ import annotations

import secrets
import sys
import webbrowser
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from paddock.cli import note, print_json
from paddock.cli.interrupts import raise_on_interrupt, run_async
from paddock.cli.store_options import store_option
from paddock.config import PADDOCK_AUTH_TOKEN
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@click.command("view")
@store_option()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, help="Port to listen on. Default: any free one.")
@click.option("--auth-token", help="Token that opens the page. Better: PADDOCK_AUTH_TOKEN. Default: a random one.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON once it listens.")
def command(store: Path | None, host: str, port: int, auth_token: str | None, no_open: bool, as_json: bool) -> None:
    """Show rollouts in the browser, while they run and afterwards."""
    view(store, host, port, auth_token, open_browser=not no_open, as_json=as_json)


def view(
    store: Path | None,
    host: str = "127.0.0.1",
    port: int = 0,
    auth_token: str | None = None,
    *,
    open_browser: bool = True,
    as_json: bool = False,
    fragment: str = "",
) -> None:
    """Serve the page until Ctrl-C. `fragment` is where the browser opens it, such as `#/rollouts/ID`."""
    from paddock.config import Access
    from paddock.store import Store
    from paddock.web.mounts import create_view_app, serve_page
    from paddock.web.read_store import ReadStore

    read_store = ReadStore(store)
    if store is not None and not read_store.exists:
        raise ConfigError(
            f"there is no store in {store}", hint="paddock rollout makes one; without --store the usual one is shown"
        )
    # The default store is created if it is missing, and a broken store is reported before the page is served.
    Store.open(read_store.folder, read_only=read_store.exists).close()
    read_store.check()
    token = auth_token or PADDOCK_AUTH_TOKEN.read() or secrets.token_urlsafe(24)
    app = create_view_app(read_store, Access(token=token))

    def announce(url: str) -> None:
        address = f"{url}/web/?token={quote(token, safe='')}{fragment}"
        if as_json:
            print_json({"url": address, "store": str(read_store.folder)})
            sys.stdout.flush()
        note(f"the page over {read_store.folder}: {address}   stop: Ctrl-C")
        if open_browser and sys.stderr.isatty():
            webbrowser.open(address)

    raise_on_interrupt()
    serve_page(app, host, port, announce)


def write_page(store: Path | None, rollout_ids: tuple[str, ...], out: Path | None) -> int:
    """Write one rollout as a file that opens without a server; into a folder, under its id."""
    from paddock.config import Access
    from paddock.web.app import Page, PageSources
    from paddock.web.read_store import ReadStore

    if len(rollout_ids) != 1:
        raise ConfigError("a page shows one rollout", hint="give one ID; paddock trace list shows them")
    page = Page(PageSources(ReadStore(store)), Access())
    try:
        name, content = run_async(page.render_share(rollout_ids[0]))
    finally:
        page.close()
    if out is None:
        sys.stdout.buffer.write(content)
        return 0
    file = out / f"{name}.html" if out.is_dir() else out
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", hint="give --out another place") from error
    note(f"{file}: {len(content) / 1024:.0f} kB")
    return 0
