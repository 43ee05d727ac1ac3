#!/usr/bin/env bash
# Finds what is missing to build llm4.c and installs it: C compiler (gcc 12+ or clang 14+), make, cJSON, OpenMP, and for
# the demo the King James Bible (bible-kjv). Silent when nothing is missing.
#
#     scripts/setup.sh [build|demo]              what `make` needs | also bible-kjv
#     source scripts/setup.sh build|demo         the same, and sets PATH, CC and CJSON_DIR for what follows
#
# Debian, Ubuntu as root or with passwordless sudo: apt-get install. Without root: the same packages are downloaded and
# unpacked under build/deps, nothing else is touched, and build/deps/settings.mk tells `make`. Elsewhere: says what to
# install. A CC or CJSON_DIR in the environment is used as it is.
set -euo pipefail

setup_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
setup_deps=$setup_root/build/deps
setup_log=$setup_root/build/setup.log
setup_say() { echo "setup: $*" >&2; }

# ---- what is there -------------------------------------------------------------------------------------------------

# Compiles and links a C11 program: setup_links COMPILER HEADER [flags and libraries].
# shellcheck disable=SC2086
setup_links() {
    local compiler=$1 header=$2
    shift 2
    printf '#include <stdio.h>\n#include <%s>\nint main(void) { return 0; }\n' "$header" |
        $compiler -std=c11 ${CJSON_DIR:+-I"$CJSON_DIR/include" -L"$CJSON_DIR/lib"} -x c - -o "$setup_root/build/probe" \
            "$@" >/dev/null 2>&1
}

# A compiler that is new enough and has its libc: its name on stdout.
# shellcheck disable=SC2086 # CC may have words, as in "ccache gcc"
setup_compiler() {
    local compiler version least candidates=(gcc gcc-{15,14,13,12} clang clang-{20,19,18,17,16,15,14} cc)
    [ -z "${CC:-}" ] || candidates=("$CC")
    for compiler in "${candidates[@]}"; do
        command -v "${compiler%% *}" >/dev/null || continue
        version=$($compiler -dumpversion 2>/dev/null) || continue
        case $($compiler --version) in *clang*) least=14 ;; *) least=12 ;; esac
        if [ "${version%%.*}" -ge "$least" ] && setup_links "$compiler" math.h -lm; then echo "$compiler" && return; fi
    done
    return 1
}

# The words for what is missing, one a line: compiler, make, cjson, openmp, bible.
setup_missing() {
    local compiler
    mkdir -p "$setup_root/build"
    command -v make >/dev/null || echo make
    [ "$1" = demo ] && { command -v bible >/dev/null || echo bible; }
    compiler=$(setup_compiler) || { echo compiler && echo cjson && return; }
    setup_links "$compiler" cjson/cJSON.h -fopenmp -lcjson && return
    setup_links "$compiler" cjson/cJSON.h -lcjson || echo cjson
    setup_links "$compiler" omp.h -fopenmp || echo openmp
}

# ---- Debian and Ubuntu ---------------------------------------------------------------------------------------------

# The Debian packages for the words. Needs package lists: where `gcc` is older than 12, gcc-12 is asked for.
setup_packages() {
    local word version
    for word in "$@"; do
        case $word in
        compiler)
            version=$(apt-cache "${setup_apt[@]}" policy gcc | sed -nE 's/^  Candidate: ([0-9]+:)?([0-9]+).*/\2/p')
            if [ "${version:-12}" -ge 12 ]; then echo gcc; else echo gcc-12; fi
            echo libc6-dev
            ;;
        make) echo make ;;
        cjson) echo libcjson-dev ;;
        openmp) $(setup_compiler) -dumpversion | sed -E 's/^([0-9]+).*/libomp-\1-dev/' ;; # gcc comes with its own
        bible) echo bible-kjv bible-kjv-text ;;
        esac
    done | xargs
}

setup_admin() { # as root: apt-get install; the package lists only when there are none or they are too old
    local packages lists=old
    setup_apt=(-o DPkg::Lock::Timeout=120)
    compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null || lists=none
    while :; do
        if [ "$lists" = none ]; then
            setup_say "apt-get update"
            "$@" apt-get -q "${setup_apt[@]}" update >>"$setup_log" 2>&1 || setup_say "apt-get update had errors, trying on"
            lists=new
        fi
        # shellcheck disable=SC2086 # words and packages are lists
        packages=$(setup_packages $setup_words)
        setup_say "apt-get install $packages"
        # shellcheck disable=SC2086
        "$@" env DEBIAN_FRONTEND=noninteractive apt-get -q "${setup_apt[@]}" install -y --no-install-recommends \
            $packages </dev/null >>"$setup_log" 2>&1 && return
        [ "$lists" = old ] || return 1
        lists=none
    done
}

setup_user() { # without root: apt with its state in build/deps, packages unpacked to build/deps/root
    local deps=$setup_deps packages status=/var/lib/dpkg/status file name compiler
    mkdir -p "$deps"/{bin,lib,include,apt/lists/partial,apt/cache/archives/partial,root/usr/lib,root/usr/lib64,root/usr/bin}
    for name in lib lib64 bin; do [ -e "$deps/root/$name" ] || ln -s "usr/$name" "$deps/root/$name"; done
    # A compiler brings all that it stands on, as if nothing were installed: one whole, consistent tree for --sysroot.
    case $setup_words in *compiler*) status=$deps/apt/status && : >"$status" ;; esac
    setup_apt=(-o "Dir::State=$deps/apt" -o "Dir::State::status=$status" -o "Dir::Cache=$deps/apt/cache"
        -o APT::Sandbox::User= -o Debug::NoLocking=1 -o Acquire::Languages=none)
    setup_say "no root: package lists into build/deps (apt-get update)"
    apt-get -q "${setup_apt[@]}" update >>"$setup_log" 2>&1 || setup_say "apt-get update had errors, trying on"
    # shellcheck disable=SC2086
    packages=$(setup_packages $setup_words)
    setup_say "no root: downloading $packages into build/deps"
    # shellcheck disable=SC2086
    apt-get -q "${setup_apt[@]}" install -y --no-install-recommends --download-only $packages \
        </dev/null >>"$setup_log" 2>&1 || return 1
    for file in "$deps"/apt/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$file" | tar -x -C "$deps/root" --keep-directory-symlink --no-same-owner || return 1
    done
    rm -rf "$deps/apt"

    # lib: the shared libraries that this system lacks; never its own libc. include: cJSON.
    for file in "$deps"/root/usr/lib/*-linux-*/{*.so.*,*-*.so,libcjson.so}; do
        name=${file##*/}
        [ -e "$file" ] && ! compgen -G "/usr/lib/*-linux-*/$name" >/dev/null &&
            ! compgen -G "/lib/*-linux-*/$name" >/dev/null && ln -sf "$file" "$deps/lib/$name"
    done
    [ -d "$deps/root/usr/include/cjson" ] && ln -sfn ../root/usr/include/cjson "$deps/include/cjson"

    local run="#!/bin/sh
export LD_LIBRARY_PATH='$deps/lib'\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
exec '$deps/root/usr/bin"
    [ -x "$deps/root/usr/bin/make" ] && ln -sf "$deps/root/usr/bin/make" "$deps/bin/make"
    [ -x "$deps/root/usr/bin/bible" ] && echo "$run/bible' -p '$deps/root/usr/lib' \"\$@\"" >"$deps/bin/bible"
    for compiler in "$deps"/root/usr/bin/{gcc-[0-9][0-9],gcc}; do
        [ -x "$compiler" ] && echo "$run/${compiler##*/}' --sysroot='$deps/root' -B'$deps/root/usr/bin/' \"\$@\"" >"$deps/bin/gcc"
    done
    chmod -f +x "$deps"/bin/* || true
}

# ---- everywhere else -----------------------------------------------------------------------------------------------

setup_explain() {
    setup_say "missing: $setup_words. Install and run this again, one of:"
    cat >&2 <<'END'
    Debian, Ubuntu   apt-get install gcc libc6-dev make libcjson-dev bible-kjv     (Ubuntu: from universe; 22.04: gcc-12)
    Fedora           dnf install gcc make cjson-devel
    Arch             pacman -S gcc make cjson
    Alpine           apk add gcc musl-dev make cjson-dev
    macOS            brew install llvm make cjson, then export CC=$(brew --prefix llvm)/bin/clang CJSON_DIR=$(brew --prefix)
cJSON from its sources: export CJSON_DIR=DIR, with DIR/include/cjson/cJSON.h and DIR/lib/libcjson.so.
bible-kjv is in Debian and Ubuntu only; elsewhere run the demo on a text of your own: scripts/demo.sh my.txt
END
    if grep -qE '^(E|W):' "$setup_log" 2>/dev/null; then
        setup_say "what apt-get said (all of it in build/setup.log):"
        grep -E '^(E|W):' "$setup_log" | awk '!seen[$0]++' | head -n 4 >&2
    fi
    exit 1
}

# ---- the run -------------------------------------------------------------------------------------------------------

setup_environment() { # what an earlier run has put under build/deps
    [ -d "$setup_deps/bin" ] || return 0
    case :$PATH: in *":$setup_deps/bin:"*) ;; *) export PATH="$setup_deps/bin:$PATH" ;; esac
    if [ -e "$setup_deps/lib/libcjson.so" ]; then export CJSON_DIR="${CJSON_DIR:-$setup_deps}"; fi
}

setup_settings() { # for a `make` without this script: what it would not find by itself
    rm -f "$setup_deps/settings.mk"
    [ "$CC" != gcc ] || [ -d "$setup_deps/bin" ] || return 0
    mkdir -p "$setup_deps"
    # shellcheck disable=SC2016 # $(origin CC) is for make
    printf '# Written by scripts/setup.sh.\nifeq ($(origin CC),default)\nCC := %s\nendif\n' \
        "$(command -v "$CC")" >"$setup_deps/settings.mk"
    [ -z "${CJSON_DIR:-}" ] || echo "CJSON_DIR ?= $CJSON_DIR" >>"$setup_deps/settings.mk"
    [ ! -d "$setup_deps/bin" ] || echo "export PATH := $setup_deps/bin:\$(PATH)" >>"$setup_deps/settings.mk"
}

setup_main() {
    local own="${CC:-}${CJSON_DIR:-}"
    setup_environment
    setup_words=$(setup_missing "$1" | xargs)
    if [ -n "$setup_words" ]; then
        rm -f "$setup_log"
        case $setup_words in
        *compiler*) [ -z "${CC:-}" ] || { setup_say "CC=$CC is no working gcc 12+ or clang 14+" && exit 1; } ;;
        *cjson*) [ -z "${CJSON_DIR:-}" ] || setup_say "no cJSON in CJSON_DIR=$CJSON_DIR" ;;
        esac
        if ! command -v apt-get >/dev/null; then
            [ "$setup_words" = openmp ] || setup_explain
        elif [ "$(id -u)" = 0 ]; then
            setup_admin || setup_explain
        elif sudo -n true 2>/dev/null; then
            setup_admin sudo -n || setup_explain
        elif [ "$setup_words" != openmp ]; then # clang finds libomp only where it is installed
            setup_words=${setup_words/openmp/}
            setup_user || setup_explain
            setup_environment
        fi
        setup_words=$(setup_missing "$1" | xargs)
        case $setup_words in
        '') ;;
        openmp) setup_say "no OpenMP for this compiler (clang: libomp): the program will use one thread" ;;
        *) setup_explain ;;
        esac
    fi
    CC=$(setup_compiler)
    export CC
    rm -f "$setup_root/build/probe"
    [ -n "$own" ] || setup_settings
}

case ${1:-build} in
build | demo) setup_main "${1:-build}" ;;
*) setup_say "usage: scripts/setup.sh [build|demo]" && exit 2 ;;
esac
