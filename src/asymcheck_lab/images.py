"""Images with a class: the digits that ship with scikit-learn, or a folder for each class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asymcheck_lab.errors import DataError
from asymcheck_lab.loading import Part, Sample, held_out

DIGITS = "scikit-learn digits"
"""Name of the embedded images: 1797 handwritten digits of 8 times 8 pixels."""

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_SHIFT = 8
_HASHED_FILES, _HASHED_BYTES = 4096, 2**16


class Images:
    """Images of one size with the numbers of their classes.

    Args:
        name: Where they are from; for messages.
        read: ``n`` to image ``n``, as PIL opens it; called by any thread.
        labels: Class of each.
        sha256: Of what decides over the images.
        size: Pixels of a side, to which each is scaled.
        channels: 1 for grey, 3 for colour.
        shifted: Whether to move each by up to an eighth of its side, as the samples'
            generator says.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[int], Any],
        labels: npt.NDArray[np.int64],
        sha256: str,
        *,
        size: int,
        channels: int,
        shifted: bool,
    ) -> None:
        self.name = name
        self.sha256 = sha256
        self._read = read
        self._labels = labels
        self._size = size
        self._mode = {1: "L", 3: "RGB"}[channels]
        self._shifted = shifted

    def __len__(self) -> int:
        return len(self._labels)

    def sample(self, index: int, rng: np.random.Generator) -> Sample:
        """See ``Samples``: values from -1 to 1, ``[channels, size, size]``.

        Raises:
            DataError: A file is no image.
        """
        image = self._read(index).convert(self._mode).resize((self._size, self._size))
        pixels = np.asarray(image, np.float32).reshape(self._size, self._size, -1)
        pixels = pixels.transpose(2, 0, 1) / 127.5 - 1
        if self._shifted:
            most = self._size // _SHIFT
            down, right = rng.integers(0, 2 * most + 1, 2)
            padded = np.pad(pixels, ((0, 0), (most, most), (most, most)), "edge")
            pixels = padded[:, down : down + self._size, right : right + self._size]
        return {"pixel_values": np.ascontiguousarray(pixels), "labels": self._labels[index]}


def digits(*, size: int, channels: int, classes: int) -> tuple[Part, Part]:
    """The embedded images: those to train on, and those for evaluation.

    Raises:
        DataError: There are more classes than the model has.
    """
    from PIL import Image
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    pixels = (found.images * (255 / 16)).round().astype(np.uint8)
    sha256 = hashlib.sha256(f"{size} {channels}\n".encode() + pixels.tobytes()).hexdigest()
    labels = found.target.astype(np.int64)
    if labels.max() >= classes:
        raise DataError(
            DIGITS,
            expected=f"at most {classes} classes, which the model has",
            found=f"{labels.max() + 1}",
        )

    def made(shifted: bool) -> Images:
        return Images(
            DIGITS,
            lambda n: Image.fromarray(pixels[n]),
            labels,
            sha256,
            size=size,
            channels=channels,
            shifted=shifted,
        )

    return held_out(made(True))[0], held_out(made(False))[1]


def read_folder(
    folder: Path, *, size: int, channels: int, classes: int
) -> tuple[Images | Part, Images | Part]:
    """The images of a folder that has a folder for each class, to train on and to evaluate.

    Where there are ``train`` and ``val``, each with a folder for each class, they are taken as
    they are; otherwise every twentieth image is for evaluation.

    The fingerprint is of name and length of every image, and of what 4096 of them, evenly
    chosen, begin with: the first 64 KiB. So it does not take long for any number of images, and
    is the same for a copy elsewhere; dates would not be.

    Raises:
        DataError: There is no class, one has no image, there are more than the model has, or
            something cannot be read.
    """
    try:
        return _read_folder(folder, classes, size=size, channels=channels)
    except OSError as failure:
        raise DataError(
            str(failure.filename or folder),
            expected="an image or folder that can be read",
            found=failure.strerror or str(failure),
        ) from failure


def _read_folder(
    folder: Path,
    classes: int,
    **options: Any,  # noqa: ANN401
) -> tuple[Images | Part, Images | Part]:
    train, val = folder / "train", folder / "val"
    if not train.is_dir() or not val.is_dir():
        if train.is_dir() and any(p.is_dir() for p in train.iterdir()):
            raise DataError(
                str(folder),
                expected="val beside train, each with a folder for each class, or neither",
                found="train with folders in it, and no val",
            )
        names = _classes(folder, classes)
        shifted, still = _images(folder, names, **options)
        return held_out(shifted)[0], held_out(still)[1]
    names = _classes(train, classes)
    other = sorted(set(_classes(val, classes)) ^ set(names))
    if other:
        raise DataError(
            str(folder), expected="the same classes in train and val", found=f"{other[:3]} in one"
        )
    return _images(train, names, **options)[0], _images(val, names, **options)[1]


def _classes(folder: Path, most: int) -> list[str]:
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise DataError(str(folder), expected="a folder with a folder for each class", found=found)
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        files = sum(p.is_file() for p in folder.iterdir())
        raise DataError(
            str(folder),
            expected="a folder for each class, with its images in it",
            found=f"{files} files and no folder",
        )
    if len(names) > most:
        raise DataError(
            str(folder),
            expected=f"at most {most} classes, which the model has",
            found=f"{len(names)} folders",
        )
    return names


def _images(
    folder: Path,
    names: Sequence[str],
    **options: Any,  # noqa: ANN401
) -> tuple[Images, Images]:
    """The images of a folder, shifted and as they are."""
    files: list[Path] = []
    labels: list[int] = []
    for number, name in enumerate(names):
        of_class = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in _SUFFIXES)
        if not of_class:
            raise DataError(
                str(folder / name),
                expected=f"images of this class, files that end with {', '.join(_SUFFIXES)}",
                found="none",
            )
        files += of_class
        labels += [number] * len(of_class)
    sha256 = hashlib.sha256(f"{options['size']} {options['channels']}\n".encode())
    every = -(-len(files) // _HASHED_FILES)
    for n, path in enumerate(files):
        relative = os.fsencode(path.relative_to(folder))
        sha256.update(b"%d %s %d\n" % (len(relative), relative, path.stat().st_size))
        if n % every == 0 and path.is_file():
            with path.open("rb") as file:
                sha256.update(file.read(_HASHED_BYTES))

    def read(index: int) -> Any:  # noqa: ANN401
        from PIL import Image

        try:
            with Image.open(files[index]) as image:
                image.load()
        except Exception as bad:  # each format raises something else
            raise DataError(str(files[index]), expected="an image", found=str(bad)) from bad
        if image.mode.startswith(("I", "F")):  # nearly all of it would become white, or black
            raise DataError(
                str(files[index]),
                expected="an image of 8 bits a channel: convert it",
                found=f"one of mode {image.mode}",
            )
        return image

    found = (str(folder), read, np.array(labels, np.int64), sha256.hexdigest())
    return Images(*found, **options, shifted=True), Images(*found, **options, shifted=False)
