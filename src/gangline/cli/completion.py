"""`gangline completion SHELL`: a script that has the shell ask gangline which words may come next.

The script runs `gangline --complete WORD ...` (complete.py), whose last word is the one under the cursor. The answer
is a line for each word that may stand there, with a tab and its meaning; a line `:files` says that a file may, too.
"""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from gangline.cli.output import print_data

BASH = """\
# gangline: completion for bash. Put it into ~/.local/share/bash-completion/completions/gangline, or into ~/.bashrc:
#     source <(gangline completion bash)
_gangline() {
    local line word current rest
    local -a words
    read -r -a words <<< "${COMP_LINE:0:COMP_POINT}"
    [[ ${COMP_LINE:COMP_POINT-1:1} == [[:space:]] ]] && words+=("")
    current=${words[${#words[@]}-1]}
    # bash takes `key=value` for three words: only what follows the last break is replaced
    rest=""
    [[ $COMP_WORDBREAKS == *=* && $current == *=* ]] && rest=${current%"${current##*=}"}
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            compopt -o filenames 2> /dev/null
            while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "${current#"$rest"}")
            continue
        fi
        word=${line%%$'\\t'*}
        [[ $word == *[=.,] ]] && compopt -o nospace 2> /dev/null
        COMPREPLY+=("${word#"$rest"}")
    done < <(gangline --complete "${words[@]:1}" 2> /dev/null)
}
complete -F _gangline gangline
"""

ZSH = """\
#compdef gangline
# gangline: completion for zsh. Put it into a folder of $fpath as _gangline, or into ~/.zshrc:
#     source <(gangline completion zsh)
_gangline() {
    local line word
    local -a open closed open_shown closed_shown
    for line in "${(@f)$(gangline --complete "${(@)words[2,CURRENT]}" 2> /dev/null)}"; do
        if [[ $line == :files ]]; then
            _files
            continue
        fi
        [[ -n $line ]] || continue
        word=${line%%$'\\t'*}
        if [[ $word == *[=.,] ]]; then
            open+=("$word") open_shown+=("${line/$'\\t'/  -- }")
        else
            closed+=("$word") closed_shown+=("${line/$'\\t'/  -- }")
        fi
    done
    (( $#open )) && compadd -Q -l -S '' -d open_shown -a open
    (( $#closed )) && compadd -Q -l -d closed_shown -a closed
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _gangline "$@"
else
    compdef _gangline gangline
fi
"""

FISH = """\
# gangline: completion for fish. Put it into ~/.config/fish/completions/gangline.fish.
function __gangline_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    for line in (gangline --complete $words[2..-1] "$current" 2> /dev/null)
        if test "$line" = ":files"
            __fish_complete_path $current
        else
            echo $line
        end
    end
end
complete -c gangline -f -a '(__gangline_complete)'
"""


class Shell(str, enum.Enum):
    """The shells that there is a script for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


SCRIPTS = {Shell.bash: BASH, Shell.zsh: ZSH, Shell.fish: FISH}


def command(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="the shell that is to complete")],
) -> None:
    """Print the script that has a shell complete verbs, options, ids of runs, keys of a job, GPUs and links."""
    print_data([SCRIPTS[shell].rstrip()])
