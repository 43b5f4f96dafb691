#!/bin/sh
# The two commands of the README: from a bare checkout to the demo, or to the tests.
#
#   sh cli/setup.sh demo [options of `dcp-mirror demo`]
#   sh cli/setup.sh test [options of pytest; without any: on every core]
#   sh cli/setup.sh dev [options of pytest]      the same, without what Spark, browser and SDK tests need (CONTRIBUTING.md)
#   sh cli/setup.sh run|sandbox|... [any other dcp-mirror command]
#
# Needs Python 3.11 or newer and the network on the first call. Makes .venv in the checkout, installs the project into
# it, then starts what was asked for. The second call finds everything in place and starts at once. Touches nothing
# outside the checkout, but for the package python3-venv where the system lacks it.
set -eu

here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
venv="$here/.venv"
say() { printf '%s\n' "setup: $*" >&2; }
die() { say "$*"; exit 2; }

[ $# -ge 1 ] || die "say what to start: 'demo' or 'test'"
want=$1
shift

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3 python3.12 python3.13 python3.14; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
fi
[ -n "$python" ] || die "Python 3.11 or newer is needed (Debian 12: apt-get install python3 python3-venv)"

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null 2>&1; then sudo -n "$@"; else return 1; fi
}

make_venv() {
  "$python" -m venv "$venv" >/dev/null 2>&1 && return 0
  if command -v uv >/dev/null 2>&1 && uv venv --quiet --seed --clear --python "$python" "$venv" >&2; then return 0; fi
  rm -rf "$venv"
  command -v apt-get >/dev/null 2>&1 || return 1
  say "this Python cannot make a virtual environment: installing python3-venv"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update >/dev/null 2>&1 || true
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends python3-venv >/dev/null 2>&1 || return 1
  "$python" -m venv "$venv" >&2
}

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
  say "making $venv"
  rm -rf "$venv"
  make_venv || die "cannot make a virtual environment; as root: apt-get install python3-venv"
fi

case "$want" in test | dev) extras=$want ;; *) extras=run ;; esac
mark="$venv/.installed-$extras"
now=$("$venv/bin/python" -c 'import hashlib, sys; print(sys.prefix, hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$here/pyproject.toml")
if [ "$(cat "$venv/.installed-test" 2>/dev/null || true)" = "$now" ]; then mark="$venv/.installed-test"; fi # has it all
if [ "$(cat "$mark" 2>/dev/null || true)" != "$now" ]; then
  say "installing dcp-mirror and what it needs (the first time only)"
  spec="$here"
  [ "$extras" = run ] || spec="$here[$extras]"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile -e "$spec" >&2 ||
    die "pip could not install the project; its message is above"
  printf '%s\n' "$now" >"$mark"
fi

cd "$here"
if [ "$extras" != run ]; then
  [ "$want" = dev ] && [ $# -eq 0 ] && set -- -n auto tests/document tests/ingest tests/sim tests/storage tests/wire
  [ $# -gt 0 ] || set -- -n auto
  unset PYTHONDONTWRITEBYTECODE # else each of several processes compiles all that it imports, for some seconds
  exec "$venv/bin/python" -m pytest "$@"
fi
exec "$venv/bin/dcp-mirror" "$want" "$@"
