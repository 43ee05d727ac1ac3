#!/usr/bin/env bash
# The King James Bible, 4.1 MB of plain English (public domain), from the Debian package bible-kjv: no download by hand.
#
#     data/kjv.sh
#
# Makes data/kjv/kjv.txt, one verse a line, if it is not there. Where the command `bible` is missing, scripts/setup.sh
# brings it, with what the build needs. scripts/demo.sh makes tokens of the text.
set -euo pipefail
case ${1:-} in
'') ;;
-h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0 ;;
*) echo "kjv: $1: takes no argument (--help)" >&2 && exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
text=data/kjv/kjv.txt sha=b5c4940bcfeee072c0935b5200d0f9d88a00a0199cb0961d16133458fcdfae5d
is_kjv() { [ -f $text ] && [ "$(sha256sum <$text)" = "$sha  -" ]; }
if ! is_kjv; then
    source scripts/setup.sh demo
    mkdir -p data/kjv
    bible -f ge1:1-rev22:21 | sed -E 's/^[^ ]+ //' >data/kjv/kjv.new && mv data/kjv/kjv.new $text
    is_kjv || echo "warning: $text is not the text this was tested with (another edition?); going on with it" >&2
fi
