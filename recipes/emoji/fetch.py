"""Get 1,026 emoji with their names: 32x32 pictures on white, and a prompt for each.

    python recipes/emoji/fetch.py

Writes data/emoji/train and data/emoji/held_out, each a folder of PNG files and a `metadata.jsonl`
of their prompts. The held-out ones are never trained on: they show what a network makes of names
that it has not seen. Which ones they are depends on their names alone.

Needs `npm` and Pillow, and about 61 MB to get. What is there already is not fetched again.

Pictures: Twemoji, (c) Twitter, Inc and other contributors, licensed under CC-BY 4.0, as the npm
package `emoji-datasource-twitter` (MIT) holds them; made smaller, and put on white. Names: those of
Unicode's CLDR (Unicode licence), as the npm package `unicode-emoji-json` (MIT) holds them.

Flags, signs and people are left out. They are half of all emoji, in three kinds of pictures, and
the names of most say nothing of how to draw them: that of a flag, say. Skin tones are, too: one
picture in five more colours is not five more pictures. Of names with the same picture the shortest
is kept, so that no held-out picture is one that is trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

PICTURES = "emoji-datasource-twitter@16.0.0"
NAMES = "unicode-emoji-json@0.9.0"
SHA256 = {
    PICTURES: "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
    NAMES: "ae7efacb55533385bf8767d613dbd36c71226669759d95919a6e9059f5e4c401",
}
FILES = ("emoji.json", "img/twitter/64/", "data-by-emoji.json")
GROUPS = (
    "Smileys & Emotion",
    "Animals & Nature",
    "Food & Drink",
    "Travel & Places",
    "Activities",
    "Objects",
)
SIDE = 32
HELD_OUT = 100
KEY = "held out"
VARIATION_SELECTOR = "\ufe0f"


@dataclass(frozen=True)
class Emoji:
    """One emoji: its prompt and the file of its picture."""

    prompt: str
    picture: Path


def fetch(package: str, folder: Path) -> Path:
    """A package of npm, unpacked in `folder`; what is there already is reused."""
    name, _, version = package.rpartition("@")
    unpacked = folder / f"{name}-{version}"
    if unpacked.is_dir():
        return unpacked
    archive = folder / f"{name}-{version}.tgz"
    if not archive.is_file():
        if shutil.which("npm") is None:
            sys.exit("npm is needed to get the emoji: install Node.js")
        print(f"Getting {package}")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", package, "--silent", "--pack-destination", str(folder)]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            sys.exit(f"npm could not get {package}")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256[package]:
        sys.exit(f"{archive} has SHA-256 {found}, not {SHA256[package]}: remove it and try again")
    unpack(archive, unpacked)
    return unpacked


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the files that are needed, without npm's `package/`; all of them, or none."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            member.name = member.name.removeprefix("package/")
            if member.name.startswith(FILES):
                files.extract(member, partial, filter="data")
    partial.rename(folder)


def clean_name(name: str) -> str:
    """A name of Unicode's as a prompt: plain lower-case words.

    "Piñata" becomes "pinata", and "twelve o’clock" "twelve o'clock": accents and typographic
    quotes are spellings that nobody types.
    """
    for typographic, plain in (("’", "'"), ("“", ""), ("”", ""), ("&", "and")):
        name = name.replace(typographic, plain)
    decomposed = unicodedata.normalize("NFKD", name)
    bare = "".join(c for c in decomposed if not unicodedata.combining(c))
    return " ".join(bare.lower().split())


def read_emoji(pictures: Path, names: Path) -> list[Emoji]:
    """All emoji of GROUPS that have both a name and a picture, in the order of their prompts.

    Args:
        pictures: of the unpacked package of pictures.
        names: of the unpacked package of names.
    """
    named: Mapping[str, Mapping[str, str]] = {
        text.replace(VARIATION_SELECTOR, ""): entry
        for text, entry in json.loads((names / "data-by-emoji.json").read_text("utf-8")).items()
        if entry["group"] in GROUPS
    }
    found: dict[str, Path] = {}
    for entry in json.loads((pictures / "emoji.json").read_text("utf-8")):
        text = "".join(chr(int(code, 16)) for code in entry["unified"].split("-"))
        name = named.get(text.replace(VARIATION_SELECTOR, ""))
        picture = pictures / "img/twitter/64" / entry["image"]
        if name is not None and picture.is_file():
            found[clean_name(name["name"])] = picture
    return [Emoji(prompt, found[prompt]) for prompt in sorted(found)]


def distinct(emoji: Sequence[Emoji]) -> list[Emoji]:
    """One emoji for each picture, of the shortest prompt; in the order that they have."""
    shortest: dict[bytes, Emoji] = {}
    for one in sorted(emoji, key=lambda one: (len(one.prompt), one.prompt)):
        shortest.setdefault(draw_on_white(one.picture).tobytes(), one)
    kept = {one.prompt for one in shortest.values()}
    return [one for one in emoji if one.prompt in kept]


def split(emoji: Sequence[Emoji], held_out: int) -> tuple[list[Emoji], list[Emoji]]:
    """Those to train on, and the `held_out` whose prompts have the lowest keyed hashes."""

    def keyed(one: Emoji) -> str:
        return hashlib.sha256(f"{KEY}\n{one.prompt}".encode()).hexdigest()

    chosen = {one.prompt for one in sorted(emoji, key=keyed)[:held_out]}
    train = [one for one in emoji if one.prompt not in chosen]
    return train, [one for one in emoji if one.prompt in chosen]


def draw_on_white(picture: Path) -> Image.Image:
    """A picture as RGB of SIDE x SIDE; each pixel is the mean of the area it stands for."""
    with Image.open(picture) as opened:
        picture_rgba = opened.convert("RGBA")
    white = Image.new("RGBA", picture_rgba.size, "white")
    flat = Image.alpha_composite(white, picture_rgba).convert("RGB")
    return flat.resize((SIDE, SIDE), Image.Resampling.BOX)


def write(emoji: Sequence[Emoji], folder: Path) -> None:
    """A folder of PNG files and their prompts; one that is there is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = []
    for one in emoji:
        draw_on_white(one.picture).save(folder / one.picture.name)
        lines.append(json.dumps({"file_name": one.picture.name, "text": one.prompt}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fetch, split, write."""
    parser = argparse.ArgumentParser(description="Get emoji pictures and their names.")
    parser.add_argument("--out", type=Path, default=Path("data/emoji"), help="where they go")
    out = parser.parse_args(arguments).out
    pictures, names = (fetch(package, out / "packages") for package in (PICTURES, NAMES))
    parts = split(distinct(read_emoji(pictures, names)), HELD_OUT)
    for name, part in zip(("train", "held_out"), parts, strict=True):
        write(part, out / name)
        print(f"{out / name}: {len(part)} emoji")


if __name__ == "__main__":
    main()
