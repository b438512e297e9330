#!/usr/bin/env bash
# docs/publish.sh SITE NAME: put a built site into the folder NAME of the branch gh-pages, beside those of other versions,
# and list them in versions.json, newest first, for the list in the sidebar (_static/versions.js). The first page leads to
# the newest release, or to "main" before there is one.
set -euo pipefail
site=$1 name=$2
pages=$(mktemp -d)
if git fetch -q origin gh-pages; then
  git worktree add -q -B gh-pages "$pages" FETCH_HEAD
else
  git worktree add -q --detach "$pages"
  git -C "$pages" checkout -q --orphan gh-pages
  git -C "$pages" rm -rqf .
fi
rm -rf "${pages:?}/$name"
cp -r "$site" "$pages/$name"
touch "$pages/.nojekyll" # folders whose names begin with _ are served
cd "$pages"
python3 - <<'END'
import json
from pathlib import Path

def place(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in name.split(".")) if name[0].isdigit() else ()

names = sorted((path.parent.name for path in Path().glob("*/index.html")), key=place, reverse=True)
Path("versions.json").write_text(json.dumps(names) + "\n")
Path("index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={names[0]}/">\n')
END
git add -A
git diff --cached --quiet || git commit -qm "Site of $name"
git push -q origin gh-pages
git worktree remove --force "$pages"
