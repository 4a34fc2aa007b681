"""`paddock trace tag`: words that people give to rollouts, to find them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paddock.cli import print_json
from paddock.cli.store_options import store_option
from paddock.cli.trace_delete import open_existing
from paddock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from pathlib import Path


@click.command("tag", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, metavar="ID… [+TAG…] [-TAG…]", type=click.UNPROCESSED)
@store_option()
@click.option("--json", "as_json", is_flag=True, help="Print the tags as JSON.")
def command(words: tuple[str, ...], store: Path | None, as_json: bool) -> int:
    """Add tags to rollouts, or remove them. Without tags, print their tags.

    paddock trace tag r1a2b3c4 +look-again -done
    """
    rollout_ids = [word for word in words if not word.startswith(("+", "-"))]
    add = [word[1:] for word in words if word.startswith("+")]
    remove = [word[1:] for word in words if word.startswith("-")]
    if not rollout_ids:
        raise ConfigError("no rollout is named", hint="paddock trace tag ID +TAG")
    with open_existing(store) as opened:
        names = []
        for rollout_id in rollout_ids:
            record = opened.get(rollout_id)
            if record is None:
                raise StoreError(f"there is no rollout {rollout_id!r}", hint="paddock trace list shows them")
            names.append(record.rollout_id)
        tags = opened.change_tags(names, add=add, remove=remove)
    if as_json:
        print_json(tags)
        return 0
    for name, own in tags.items():
        click.echo(f"{name}  {' '.join(own)}")
    return 0
