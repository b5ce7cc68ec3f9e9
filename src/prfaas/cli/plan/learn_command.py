"""`prfaas learn`: the interactive explanation, a page that needs neither server nor network."""

from __future__ import annotations

import webbrowser
from importlib import resources
from pathlib import Path

import click

from prfaas.cli.common.options import FILE
from prfaas.presentation import write_file

PAGE = "gateway/console/assets/learn.html"


@click.command()
@click.option("--out", type=FILE, help="Write the page to a file instead, to publish or send it.")
@click.option(
    "--print", "only_prints", is_flag=True, help="Print the page's path; open no browser."
)
def learn(*, out: Path | None, only_prints: bool) -> None:
    """Open the interactive explanation of Prefill-as-a-Service in a browser.

    The page explains when a prompt is worth sending to another datacenter, what the threshold
    does, and what happens when something breaks. It is one file without external resources. A
    gateway serves it at /console/learn.html, with the requests of its deployment.

    \b
    Examples:
      prfaas learn
      prfaas learn --print
      prfaas learn --out explanation.html
    """
    page = resources.files("prfaas").joinpath(PAGE)
    if out is not None:
        write_file("--out", out, page.read_text(encoding="utf-8"))
        click.echo(f"wrote {out}")
        return
    with resources.as_file(page) as path:
        address = path.resolve()
        click.echo(address)
        if not only_prints and not webbrowser.open(address.as_uri()):
            click.echo("no browser was found here; open this file in one", err=True)
