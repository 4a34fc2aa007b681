"""`paddock view`: the page over the store."""

from __future__ import annotations

import secrets
import sys
import webbrowser
from pathlib import Path
from urllib.parse import quote

import click

from paddock.cli import note, print_json
from paddock.cli.interrupts import raise_on_interrupt, run_async
from paddock.config import read_variables
from paddock.errors import ConfigError


@click.command("view")
@click.option("--store", type=click.Path(path_type=Path), help="Where rollouts are kept. Also: PADDOCK_STORE.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, help="Port to listen on. Default: any free one.")
@click.option("--auth-token", help="Token that opens the page. Better: PADDOCK_AUTH_TOKEN. Default: one is made up.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON once it listens.")
def command(store: Path | None, host: str, port: int, auth_token: str | None, no_open: bool, as_json: bool) -> None:
    """Look at rollouts in the browser: while they run and afterwards, down to each token."""
    view(store, host, port, auth_token, opens=not no_open, as_json=as_json)


def view(
    store: Path | None,
    host: str = "127.0.0.1",
    port: int = 0,
    auth_token: str | None = None,
    *,
    opens: bool = True,
    as_json: bool = False,
    place: str = "",
) -> None:
    """Serve the page until Ctrl-C. `place` is what the browser opens it at, such as `#/rollouts/ID`."""
    from paddock.config import Access
    from paddock.rollouts.store import Store
    from paddock.web.app import create_view_app
    from paddock.web.run import serve_page
    from paddock.web.shelf import Shelf

    shelf = Shelf(store)
    if store is not None and not shelf.exists:
        raise ConfigError(
            f"there is no store in {store}", hint="paddock rollout makes one; without --store the usual one is shown"
        )
    # Before anybody looks: the usual store is made if it is missing, and a broken one is told here.
    Store.open(shelf.folder, read_only=shelf.exists).close()
    shelf.check()
    token = auth_token or read_variables().auth_token or secrets.token_urlsafe(24)
    app = create_view_app(shelf, Access(token=token))

    def announce(url: str) -> None:
        address = f"{url}/web/?token={quote(token, safe='')}{place}"
        if as_json:
            print_json({"url": address, "store": str(shelf.folder)})
            sys.stdout.flush()
        note(f"the page over {shelf.folder}: {address}   stop: Ctrl-C")
        if opens and sys.stderr.isatty():
            webbrowser.open(address)

    raise_on_interrupt()
    serve_page(app, host, port, announce)


def write_page(store: Path | None, rollout_ids: tuple[str, ...], out: Path | None) -> int:
    """Write one rollout as a file that opens without a server; into a folder, under its id."""
    from paddock.config import Access
    from paddock.web.app import Page, Parts
    from paddock.web.shelf import Shelf

    if len(rollout_ids) != 1:
        raise ConfigError("a page shows one rollout", hint="give one ID; paddock trace list shows them")
    page = Page(Parts(Shelf(store)), Access())
    try:
        name, content = run_async(page.shared(rollout_ids[0]))
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
