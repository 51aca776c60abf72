#!/bin/bash
# Collects the parts that have arrived into a folder (by default ft among temporary files), and
# unpacks what is whole:
# with the first part the texts, with both the model.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-${TMPDIR:-/tmp}/ft}
packed=$target/packed
mkdir -p "$packed" "$target/texts" "$target/smollm2" "$target/site"
for part in part1 part2; do
  if [ -d "$here/$part" ]; then cp -f "$here/$part"/* "$packed/"; fi
done
unpack() { # FILE... TARGET: join the files, decompress
  [ -s "${*: -1}" ] || "${PYTHON:-python3}" - "$@" <<'PY'
import lzma, pathlib, sys
*files, target = map(pathlib.Path, sys.argv[1:])
target.write_bytes(lzma.decompress(b"".join(file.read_bytes() for file in files)))
PY
}
if [ -f "$packed/site.tar.gz" ]; then
  tar -xzf "$packed/site.tar.gz" -C "$target/site"
  for file in "$packed"/*.txt.xz; do unpack "$file" "$target/texts/$(basename "$file" .xz)"; done
  unpack "$packed/tokens.npz.xz" "$target/smollm2/tokens.npz"
fi
model=SmolLM2-135M-Instruct.Q4_1.gguf
if [ -f "$packed/$model.xz.0" ] && [ -f "$packed/$model.xz.1" ]; then
  unpack "$packed/$model.xz.0" "$packed/$model.xz.1" "$target/smollm2/$model"
  echo "load.sh: everything is there"
else
  echo "load.sh: $(ls "$packed" | wc -l) files, a part is still missing"
fi
ls -l "$target/texts" "$target/smollm2"
