"""Images with a class: the digits that ship with scikit-learn, or a folder for each class."""

from __future__ import annotations

import hashlib
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


def digits(*, size: int, channels: int) -> tuple[Part, Part]:
    """The embedded images: those to train on, and those for evaluation."""
    from PIL import Image
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    pixels = (found.images * (255 / 16)).round().astype(np.uint8)
    sha256 = hashlib.sha256(pixels.tobytes()).hexdigest()
    labels = found.target.astype(np.int64)

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

    Raises:
        DataError: There is no class, one has no image, or there are more than the model has.
    """
    options: dict[str, Any] = {"size": size, "channels": channels}
    if not (folder / "train").is_dir() or not (folder / "val").is_dir():
        names = _classes(folder, classes)
        train = held_out(_images(folder, names, **options, shifted=True))[0]
        return train, held_out(_images(folder, names, **options, shifted=False))[1]
    names = _classes(folder / "train", classes)
    other = sorted(set(_classes(folder / "val", classes)) ^ set(names))
    if other:
        raise DataError(
            str(folder), expected="the same classes in train and val", found=f"{other[:3]} in one"
        )
    return (
        _images(folder / "train", names, **options, shifted=True),
        _images(folder / "val", names, **options, shifted=False),
    )


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


def _images(folder: Path, names: Sequence[str], **options: Any) -> Images:  # noqa: ANN401
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
    sha256 = hashlib.sha256()
    for path in files:
        sha256.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())

    def read(index: int) -> Any:  # noqa: ANN401
        from PIL import Image

        try:
            with Image.open(files[index]) as image:
                image.load()
                return image
        except (OSError, ValueError, SyntaxError) as bad:  # PIL raises each of them
            raise DataError(str(files[index]), expected="an image", found=str(bad)) from bad

    return Images(str(folder), read, np.array(labels, np.int64), sha256.hexdigest(), **options)
