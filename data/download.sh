#!/usr/bin/env bash
# One file from the net, complete or absent: it grows as FILE.part, and is renamed when it is whole. Where an earlier try
# stopped, the next goes on. What the other scripts here call; silent when FILE is there.
#
#     data/download.sh URL FILE [BYTES]
#
# BYTES: the size that FILE must have. A file of tokens (llm.c's .bin) must have the size that its own header says.
# Exit code 1 with one line of why; what was loaded until then stays.
set -euo pipefail
case ${1:-} in
-h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0 ;;
esac
[ $# -ge 2 ] || { echo "usage: data/download.sh URL FILE [BYTES]" >&2 && exit 2; }
url=$1 file=$2 bytes=${3:-} part=$2.part
stop() { echo "download: $*" >&2 && exit 1; }

# Is this file whole? yes, no (too short), or wrong (it can never be).
whole() {
    local size wanted=$bytes magic version tokens
    [ -s "$1" ] || { echo no && return; }
    size=$(wc -c <"$1")
    if [ "$size" -ge 1024 ]; then
        read -r magic version tokens < <(od -An -t d4 -N 12 "$1")
        case "$magic $version" in # int32[256]: magic, version, tokens; then the tokens
        "20240520 1") wanted=$((1024 + 2 * tokens)) ;;
        "20240801 7") wanted=$((1024 + 4 * tokens)) ;;
        esac
    fi
    [ -n "$wanted" ] || { echo unknown && return; }
    if [ "$size" -eq "$wanted" ]; then echo yes; elif [ "$size" -lt "$wanted" ]; then echo no; else echo wrong; fi
}

[ ! -e "$file" ] || exit 0
command -v curl >/dev/null || stop "needs curl (apt-get install curl)"
mkdir -p "$(dirname "$file")"
[ "$(whole "$part")" != wrong ] || rm "$part"
if [ "$(whole "$part")" != yes ]; then
    echo "download: $file" >&2
    status=0
    curl --fail --silent --show-error --location --continue-at - --connect-timeout 20 --speed-limit 1000 --speed-time 60 \
        --retry 5 --retry-delay 2 --output "$part" "$url" 2>"$part.log" || status=$?
    why=$(grep -v '^Warning' "$part.log" | tail -n 1) || why="curl: exit code $status"
    rm -f "$part.log"
    case $status in
    0) ;;
    5 | 6 | 7 | 28 | 35) stop "cannot reach $url: $why. Without a network here, load it elsewhere and put it to $file" ;;
    22) stop "$url: $why" ;;
    *) stop "$file: $why; what there is stays in $part, run it again to go on" ;;
    esac
fi
case $(whole "$part") in
yes | unknown) mv "$part" "$file" ;;
no) stop "$part: $(wc -c <"$part") bytes of $url are not the whole file; run it again to go on" ;;
*) rm "$part" && stop "$url: not the file it should be (a wrong size); removed" ;;
esac
