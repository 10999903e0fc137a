# Completion of netplugin's commands, their options, and the values that an option takes.
_netplugin() {
    local -A words=(
@WORDS@
    )
    local word=${COMP_WORDS[COMP_CWORD]} last=${COMP_WORDS[COMP_CWORD-1]} line='' command='' each
    for each in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        [[ $each == -* ]] && break
        line+="$each "
        [[ ${words[${line% }]:-} ]] && command=${line% }
    done
    if [[ $last == -* && ${words[$command $last]:-} ]]; then
        each=${words[$command $last]}
    elif [[ $word == -* && $command ]]; then
        each=${words[$command]}
    elif [[ $last == -* ]]; then
        return
    else
        each=$(for each in "${!words[@]}"; do
            [[ $each != *' -'* && $each == "$line"* ]] && each=${each#"$line"} && echo "${each%% *}"
        done | sort -u)
    fi
    mapfile -t COMPREPLY < <(compgen -W "$each" -- "$word")
}
complete -o default -F _netplugin netplugin
