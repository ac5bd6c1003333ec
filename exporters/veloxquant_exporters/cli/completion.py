"""`vqmon completion`: click's own script for a shell."""

from __future__ import annotations

import click

__all__ = ["VARIABLE", "command"]

# The one that click derives from the command's name.
VARIABLE = "_VQMON_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the script that completes vqmon in a shell.

    It asks vqmon itself, so it stays true over versions. bash needs version 4.4 or newer, which
    macOS does not bring.

    \b
    For good, a line in the file that the shell reads at its start:
      bash  ~/.bashrc                     eval "$(vqmon completion bash)"
      zsh   ~/.zshrc, below compinit      eval "$(vqmon completion zsh)"
      fish  ~/.config/fish/config.fish    vqmon completion fish | source

    Example: vqmon completion bash > ~/.local/share/bash-completion/completions/vqmon
    """  # noqa: D301 - \b is click's mark for lines that stay as they are
    from click.shell_completion import get_completion_class

    from veloxquant_exporters.cli.group import vqmon

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(vqmon, {}, "vqmon", VARIABLE).source())
    return 0
