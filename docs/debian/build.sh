#!/bin/sh
# A Debian package of dcp-mirror: sh docs/debian/build.sh FOLDER [WHEEL], in a checkout, on the release that it is for.
# It has a virtual environment in /opt/dcp-mirror and the systemd unit. Needs python3-venv and dpkg. Offline, with every
# wheel in a folder: PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/wheels sh docs/debian/build.sh FOLDER
set -eu
out=$(realpath "${1:?name the folder for the package}")
cd "$(dirname "$0")/../.."
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
home=$root/opt/dcp-mirror

"${PYTHON:-/usr/bin/python3}" -m venv "$home"
"$home/bin/python" -m pip install --quiet --no-compile "${2:-.}"
"$home/bin/python" -m pip uninstall --quiet --yes pip setuptools
grep -rlI "$root" "$home/bin" "$home/pyvenv.cfg" | xargs sed -i "s#$root##g"
rm -f "$home"/bin/*ctivate*
"$home/bin/python" -m compileall -q -s "$root" "$home/lib"
version=$("$home/bin/python" -P -c 'from importlib.metadata import version; print(version("dcp-mirror"))')
python=$("$home/bin/python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')

install -d "$root/usr/bin" "$root/DEBIAN"
ln -s /opt/dcp-mirror/bin/dcp-mirror "$root/usr/bin/dcp-mirror"
install -Dm644 -t "$root/usr/lib/systemd/system" systemd/dcp-mirror@.service
install -Dm644 systemd/dcp-mirror.sysusers.conf "$root/usr/lib/sysusers.d/dcp-mirror.conf"
install -Dm644 systemd/dcp-mirror.tmpfiles.conf "$root/usr/lib/tmpfiles.d/dcp-mirror.conf"

cat >"$root/DEBIAN/control" <<END
Package: dcp-mirror
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: ${DEBFULLNAME:-dcp-mirror maintainers} <${DEBEMAIL:-maintainers@localhost}>
Installed-Size: $(du -sk "$root" | cut -f1)
Depends: python3 (>= $python), python3 (<< ${python%.*}.$((${python#*.} + 1))~), systemd
Section: database
Priority: optional
Description: local, durable read replica of a Couchbase bucket
 Follows a bucket by DCP, keeps it in LMDB, and serves reads by KV, HTTP and DCP.
 One instance of dcp-mirror@.service is one mirror: see /opt/dcp-mirror/share/doc.
END
cat >"$root/DEBIAN/postinst" <<'END'
#!/bin/sh
set -e
if [ "$1" = configure ]; then
  systemd-sysusers dcp-mirror.conf
  systemd-tmpfiles --create dcp-mirror.conf
  if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
fi
END
chmod 755 "$root/DEBIAN/postinst"
dpkg-deb --root-owner-group --build "$root" "$out"
