"""Small data sets in the published formats, and the options with which sources read them."""

import gzip
import io
import json
import lzma
import pickle
import struct
import wave
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from scanl.data.files import folders
from scanl.data.published.audio import TEN, WORDS

WRITERS: dict[str, Callable[[Path], None]] = {}
# With which a source reads the small files. Other options are the defaults.
OPTIONS: dict[str, dict[str, object]] = {
    "mnist": {"aside": 4},
    "fashion_mnist": {"aside": 4},
    "psmnist": {"aside": 4},
    "lra_image": {"aside": 2},
    "mnist_pixels": {"aside": 4},
    "cifar10": {"aside": 4},
    "cifar100": {"aside": 2},
    "cifar10_pixels": {"aside": 4},
    "noise_padded_cifar10": {"aside": 4},
    "imagenet64_pixels": {"aside": 2},
    "imdb": {"aside": 2, "max_length": 12},
    "lra_retrieval": {"max_length": 9},
    "lra_listops": {"max_length": 12},
    "hg38": {"interval": 40},
    "ucr": {"problem": "Small"},
    "pendulum": {"count": 6},
    "speech_commands": {"max_length": 30},
    "sc10": {"max_length": 20},
    "atari": {"window": 6, "screens": 2},
    "beethoven": {"piece": 40},
    "mmlu": {"max_length": 60},
    "imagenet": {"side": 28, "patch": 7, "aside": 2},
    "wmt14": {"max_length": 40},
    "iwslt14": {"max_length": 40},
    "verses": {"max_length": 60},
    "youtubemix": {"piece": 40},
    "sc09": {"max_length": 30},
}


def writes(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(write: Callable[[Path], None]) -> Callable[[Path], None]:
        WRITERS[name] = write
        return write

    return add


def write_all(root: Path) -> None:
    """Write every data set below a folder."""
    for name in folders:
        written(root, name)


def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder of data sets, whose digests and counts are not known."""
    monkeypatch.setenv("SCANL_DATA", str(tmp_path / "data"))
    for files in folders.values():
        monkeypatch.setattr(files, "sha256", {})
        monkeypatch.setattr(files, "counts", {})
    return tmp_path / "data"


def written(root: Path, name: str) -> Path:
    """Write a data set into its folder below `root`, and return that folder."""
    (root / name).mkdir(parents=True)
    WRITERS[name](root / name)
    return root / name


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).integers(0, 256, shape).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    """The IDX form: a big-endian magic number of the type (8) and the dimensions, the sizes, the bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


@writes("mnist")
def mnist(folder: Path) -> None:
    for part, count in (("train", 24), ("t10k", 10)):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(random(count, 28, 28)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx((np.arange(count) % 10).astype(np.uint8)))


@writes("fashion_mnist")
def fashion_mnist(folder: Path) -> None:
    mnist(folder)
    for path in list(folder.iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


@writes("cifar10")
def cifar10(folder: Path) -> None:
    from PIL import Image

    for name in (*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"):
        Image.fromarray(random(4, 1024, 3)).save(folder / name)
    (folder / "train_lables.json").write_text(json.dumps([i % 10 for i in range(20)]))
    (folder / "test_lables.json").write_text("[3, 8, 8, 0]")


@writes("cifar100")
def cifar100(folder: Path) -> None:
    (folder / "train.bin").write_bytes(random(8, 3074).__mod__(100).tobytes())
    (folder / "test.bin").write_bytes(random(3, 3074).__mod__(100).tobytes())


@writes("imagenet64")
def imagenet64(folder: Path) -> None:
    for name in (*(f"train_data_batch_{i}" for i in range(1, 11)), "val_data"):
        np.savez(folder / f"{name}.npz", data=random(1, 12288), labels=np.array([1]))


@writes("enwik8")
def enwik8(folder: Path) -> None:
    (folder / "enwik8").write_bytes(random(2000).tobytes())


@writes("text8")
def text8(folder: Path) -> None:
    (folder / "text8").write_bytes(bytes(b"abcdefghijklmnopqrstuvwxyz "[i % 27] for i in random(2000)))


@writes("ptb")
def ptb(folder: Path) -> None:
    for part in ("train", "valid", "test"):
        (folder / f"ptb.{part}.txt").write_text(" no it was n't <unk> black monday \n but N is \n" * 9)


@writes("wikitext103")
def wikitext103(folder: Path) -> None:
    for part in ("train", "valid", "test"):
        (folder / f"wiki.{part}.tokens").write_text(" \n = Robert = \n \n Robert is an <unk> actor . \n" * 9)


@writes("pg19")
def pg19(folder: Path) -> None:
    for part in ("train", "validation", "test"):
        (folder / part).mkdir()
        for book in (11, 5):
            (folder / part / f"{book}.txt").write_text(f"{part} {book}: it was the best of times\n" * 3)


@writes("ecoli")
def ecoli(folder: Path) -> None:
    bases = "".join("ACGT"[i % 4] for i in random(700))
    fasta = ">gi|110640213 Escherichia coli 536\n" + "\n".join(bases[i : i + 70] for i in range(0, 700, 70)) + "\n"
    (folder / "NC_008253.fna.gz").write_bytes(gzip.compress(fasta.encode()))


@writes("hg38")
def hg38(folder: Path) -> None:
    (folder / "hg38.ml.fa").write_text(">chr1\n" + "ACGTNacgtn\n" * 12 + ">chr2\n" + "TTTTT\n" * 12)
    lines = ["chr1\t0\t20\ttrain", "chr2\t10\t60\ttrain", "chr1\t50\t70\tvalid", "chr2\t20\t40\ttest"]
    (folder / "human-sequences.bed").write_text("\n".join(lines) + "\n")


@writes("imdb")
def imdb(folder: Path) -> None:
    reviews = [{"t": f"{'good' if i % 2 else 'bad'} film {i}é", "s": i % 2} for i in range(20)]
    (folder / "reviews.json").write_text(json.dumps(reviews))


@writes("aan")
def aan(folder: Path) -> None:
    for part in ("train", "eval", "test"):
        rows = [f'{i % 2}.0\tid{i}\tid{i + 1}\tpaper "{i}"\tanother paper' for i in range(6)]
        (folder / f"new_aan_pairs.{part}.tsv").write_text("\n".join(rows) + "\n")


@writes("listops")
def listops(folder: Path) -> None:
    for part in ("train", "val", "test"):
        rows = ["Source\tTarget", "( ( ( [MAX 4 ) 3 ) ] )\t4", "( ( ( ( [SM 9 ) 3 ) 1 ) ] )\t3", "5\t5"]
        (folder / f"basic_{part}.tsv").write_text("\n".join(rows) + "\n")


def pathfinder(folder: Path, side: int) -> None:
    """Two lists of pictures: one of text, as in the Long Range Arena, one an array, as the generator writes it."""
    from PIL import Image

    top = folder / "curv_contour_length_14"
    (top / "metadata").mkdir(parents=True)
    for number, count in ((2, 12), (10, 8)):
        rows = [
            [f"imgs/{number}", f"sample_{i}.png", str(i), str((i + number // 2) % 2), "1.8", "0.5"]
            for i in range(count)
        ]
        (top / "imgs" / str(number)).mkdir(parents=True)
        for _, name, i, *_ in rows:
            pixels = np.where(random(side, side) > 250, 255, int(i))
            Image.fromarray(pixels.astype(np.uint8)).save(top / "imgs" / str(number) / name)
        if number == 2:
            (top / "metadata" / "2.npy").write_text("\n".join(map(" ".join, rows)) + "\n")
        else:
            np.save(top / "metadata" / "10.npy", np.array(rows))


writes("pathfinder32")(partial(pathfinder, side=32))
writes("pathfinder128")(partial(pathfinder, side=128))


def ts(rows: list[str], extra: str = "@classLabel true a b") -> str:
    return "# a comment\n@problemName Small\n@timeStamps false\n" + f"{extra}\n@data\n" + "\n".join(rows) + "\n"


def series(count: int, channels: int, steps: int) -> list[str]:
    values = random(count, channels, steps) / 100
    return [":".join(",".join(f"{v:.2f}" for v in channel) for channel in row) for row in values]


@writes("ucr")
def ucr(folder: Path) -> None:
    for part, count in (("TRAIN", 10), ("TEST", 4)):
        rows = [f"{row}:{'ab'[i % 2]}" for i, row in enumerate(series(count, 2, 5))]
        rows[0] = "1.5,2.5,?:0,1,NaN:a"  # ends after two steps
        (folder / f"Small_{part}.ts").write_text(ts(rows))


@writes("eigenworms")
def eigenworms(folder: Path) -> None:
    for part in ("TRAIN", "TEST"):
        rows = [f"{row}:{1 + i % 5}" for i, row in enumerate(series(10, 6, 7))]
        (folder / f"EigenWorms_{part}.ts").write_text(ts(rows, "@classLabel true 1 2 3 4 5"))


@writes("bidmc")
def bidmc(folder: Path) -> None:
    for vital in ("RR", "HR", "SpO2"):
        for part in ("TRAIN", "TEST"):
            rows = [f"{row}:{80 + i}.5" for i, row in enumerate(series(10, 2, 8))]
            (folder / f"BIDMC32{vital}_{part}.ts").write_text(ts(rows, "@targetlabel true"))


@writes("spoken_digits")
def spoken_digits(folder: Path) -> None:
    lengths = np.array([3 + i % 4 for i in range(20)])
    values = random(lengths.sum(), 13) / 100
    np.savez(folder / "digits.npz", X=values, y=np.arange(20) % 10, lengths=lengths, idxs=np.arange(10))


@writes("har")
def har(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / part / "Inertial Signals").mkdir(parents=True)
        (folder / part / f"y_{part}.txt").write_text("".join(f"{1 + i % 6}\n" for i in range(12)))
        for kind in ("body_acc", "body_gyro", "total_acc"):
            for axis in "xyz":
                rows = [" ".join(f"{v:.7e}" for v in row) for row in random(12, 128) / 255]
                (folder / part / "Inertial Signals" / f"{kind}_{axis}_{part}.txt").write_text("\n".join(rows) + "\n")


@writes("sepsis")
def sepsis(folder: Path) -> None:
    vital = [f"V{i}" for i in range(34)]
    columns = [*vital, "Age", "Gender", "Unit1", "Unit2", "HospAdmTime", "ICULOS", "SepsisLabel"]
    for name in ("training_setA", "training_setB"):
        (folder / name).mkdir()
        for stay in range(8):
            rows = ["|".join(columns)]
            for hour in (1, 2, 4, 5 + stay):
                values = [str(i) if (hour + i) % 3 else "NaN" for i in range(34)]
                label = int(stay % 2 and hour > 4)
                rows.append("|".join([*values, "60", "1", "NaN", "1", "-0.5", str(hour), str(label)]))
            (folder / name / f"p{stay:06}.psv").write_text("\n".join(rows) + "\n")


def waves(folder: Path, file: str, first: str, columns: list[str], rows: int = 240, delimiter: str = ",") -> None:
    t = np.arange(rows)
    values = [np.sin(2 * np.pi * t / 12 + k).round(3) + k for k in range(len(columns))]
    lines = [delimiter.join(map(str, ["x", *row])) for row in zip(*values, strict=True)]
    lines[3] = delimiter.join(["x", "NA" if file == "hourly_beijing_pm.csv" else "", *lines[3].split(delimiter)[2:]])
    (folder / file).write_text("\n".join([delimiter.join([first, *columns]), *lines]) + "\n")


def music(folder: Path, file: str) -> None:
    """As Python 2 wrote it: protocol 0 or 2, frames that are tuples of numbers."""
    pieces = [[(60 + i, 64 + t % 5, 67) if t % 3 < 2 else () for t in range(4 + i)] for i in range(5)]
    parts = {"train": pieces, "valid": pieces[:2], "test": pieces[3:]}
    (folder / file).write_bytes(pickle.dumps(parts, 0 if file.startswith("JSB") else 2))


for set_name, file_name in (
    ("jsb_chorales", "JSB Chorales.pickle"),
    ("nottingham", "Nottingham.pickle"),
    ("piano_midi", "Piano-midi.de.pickle"),
    ("muse_data", "MuseData.pickle"),
):
    writes(set_name)(partial(music, file=file_name))


def note(step: str, octave: int, duration: int, *, extra: str = "") -> str:
    pitch = f"<pitch><step>{step}</step><octave>{octave}</octave></pitch>" if step else "<rest/>"
    return f"<note>{extra}{pitch}<duration>{duration}</duration></note>"


def compressed_score(*parts: str, head: str = "", root: str = "score-partwise") -> bytes:
    """A file of compressed MusicXML, from the measures of its parts. A quarter note has four divisions."""
    divisions = "<attributes><divisions>4</divisions></attributes>"
    text = "".join(f"<part>{part.replace('<measure>', f'<measure>{divisions}', 1)}</part>" for part in parts)
    rootfile = '<container><rootfiles><rootfile full-path="a.xml"/></rootfiles></container>'
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("META-INF/container.xml", rootfile)
        archive.writestr("a.xml", f'<?xml version="1.0" encoding="utf-8"?>\n{head}<{root}>{text}</{root}>')
    return found.getvalue()


@writes("bach_chorales")
def bach_chorales(folder: Path) -> None:
    (folder / "bach").mkdir()
    for number in range(11):
        measure = "".join(note("CDEFGAB"[(number + t) % 7], 4, 4) for t in range(3 + number))
        parts = [f"<measure>{measure}</measure>"] * (5 if number == 7 else 4)
        (folder / "bach" / f"bwv{number}.mxl").write_bytes(compressed_score(*parts))


for set_name, file_name, column_names in (
    ("etth1", "ETTh1.csv", ["HUFL", "OT"]),
    ("etth2", "ETTh2.csv", ["HUFL", "OT"]),
    ("ettm1", "ETTm1.csv", ["HUFL", "OT"]),
    ("ettm2", "ETTm2.csv", ["HUFL", "OT"]),
    ("ecl", "ECL.csv", ["MT_001", "MT_320"]),
    ("weather", "weather.csv", ["p (mbar)", "OT"]),
    ("electricity", "electricity.csv", ["0", "OT"]),
    ("informer_weather", "WTH.csv", ["Visibility", "WetBulbCelsius"]),
    ("traffic", "traffic.csv", ["0", "OT"]),
    ("exchange_rate", "exchange_rate.csv", ["0", "OT"]),
    ("illness", "national_illness.csv", ["AGE 0-4", "OT"]),
    ("hourly_electricity", "hourly_electricity.csv", ["y"]),
    ("beijing_pm25", "hourly_beijing_pm.csv", ["pm2.5", "DEWP", "TEMP", "PRES", "Iws"]),
    ("sunspots", "sunspots.csv", ["SUNACTIVITY"]),
    ("co2", "co2.csv", ["co2"]),
):
    writes(set_name)(partial(waves, file=file_name, first="date", columns=column_names))


@writes("household_power")
def household_power(folder: Path) -> None:
    waves(folder, "minute_household_power.csv", "Date", ["Time", "Global_active_power", "Voltage"], 14_400)
    path = folder / "minute_household_power.csv"
    (folder / "minute_household_power.csv.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()


def wav(path: Path, samples: bytes) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(samples)


@writes("speech_commands")
def speech_commands(folder: Path) -> None:
    lists: dict[str, list[str]] = {"validation_list.txt": [], "testing_list.txt": []}
    for word in WORDS:
        (folder / word).mkdir()
        for speaker in range(7 if word in TEN else 3):
            samples = 20 if speaker > 2 else 20 + speaker  # those of 20 are whole
            wav(folder / word / f"{speaker}a_nohash_0.wav", random(speaker + 1, 2 * samples)[-1].tobytes())
        lists["validation_list.txt"].append(f"{word}/1a_nohash_0.wav")
        lists["testing_list.txt"].append(f"{word}/2a_nohash_0.wav")
    for name, listed in lists.items():
        (folder / name).write_text("\n".join(listed) + "\n")


def piano(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    for number in range(17):
        wav(folder / name / f"{name}{number}.wav", random(number + 1, 2 * 100)[-1].tobytes())


writes("beethoven")(partial(piano, name="beethoven"))
writes("youtubemix")(partial(piano, name="youtubemix"))


def sphere(samples: np.ndarray, **facts: str) -> bytes:
    known = {"channel_count": "-i 1", "sample_count": f"-i {len(samples)}", "sample_rate": "-i 16000"}
    known |= {"sample_n_bytes": "-i 2", "sample_byte_format": "-s2 01", "database_id": "-s5 TIMIT", **facts}
    lines = ["NIST_1A", "   1024", *(f"{name} {value}" for name, value in known.items()), "end_head"]
    return ("\n".join(lines) + "\n").encode().ljust(1024) + samples.astype("<i2").tobytes()


@writes("timit")
def timit(folder: Path) -> None:
    speakers = {"TRAIN/DR1/FCJF0": 3, "TEST/DR1/FAKS0": 2, "TEST/DR2/MDAB0": 2, "TEST/DR2/MABC0": 1}
    for speaker, sentences in speakers.items():
        (folder / speaker).mkdir(parents=True)
        for number in range(sentences):
            samples = random(2 * (600 + 100 * number)).view("<i2")
            for kind in ("SA", "SI", "SX"):
                (folder / speaker / f"{kind}{number}.WAV").write_bytes(sphere(samples))


@writes("atari")
def atari(folder: Path) -> None:
    """Two checkpoints of episodes of five, nine and four transitions, and of a rest that does not end."""
    logs = folder / "Breakout" / "1" / "replay_logs"
    logs.mkdir(parents=True)
    for checkpoint in (0, 12):
        store = {
            "observation": random(20, 84, 84) // 64 + checkpoint,
            "action": (np.arange(20) % 4).astype(np.int32),
            "reward": (np.arange(20) % 3).astype(np.float32),
            "terminal": np.isin(np.arange(20), (4, 13, 17)).astype(np.uint8),
        }
        for name, array in store.items():
            with gzip.open(logs / f"$store$_{name}_ckpt.{checkpoint}.gz", "wb", compresslevel=1) as file:
                np.save(file, array)


@writes("wmt14")
def wmt14(folder: Path) -> None:
    for part in ("train", "newstest2013", "newstest2014"):
        (folder / f"{part}.en").write_text("".join(f"A cat {i} .\n" for i in range(5)), "utf-8")
        (folder / f"{part}.de").write_text("".join(f"Eine Kätzin {i} .\n" for i in range(5)), "utf-8")


@writes("verses")
def verses(folder: Path) -> None:
    """Two books of the old testament and one of the new, of two chapters with five verses each."""
    names = {"ot": ("Genesis", "Ruth"), "nt": ("Matthew",)}
    english = {}
    for testament, books in names.items():
        texts = ["", '<milestone n="module"/>']
        for book in books:
            texts.append(f'<div type="book"/><title>{book}</title>')
            for chapter in (1, 2):
                texts.append(f'<chapter n="{chapter}"/>')
                for verse in range(5):
                    english[f"{book} {chapter}:{verse + 1}"] = f"# And [it] was {book} {chapter} {verse}."
                    texts.append(f'<w lemma="strong:1">Y fué</w>  {book}\n{chapter} {verse}.<note>a <w>b</w></note> ')
        texts[5] = ""  # verse 1:2 of the first book is one with the verse before
        blocks, table, packed, records = [texts[:8], texts[8:]], b"", b"", []
        for number, block in enumerate(blocks):
            joined, begin = b"".join(text.encode() for text in block), len(packed)
            packed += zlib.compress(joined)
            table += struct.pack("<III", begin, len(packed) - begin, len(joined))
            at = 0
            for text in block:
                records.append(struct.pack("<IIH", number, at, len(text.encode())))
                at += len(text.encode())
        for ending, content in (("bzs", table), ("bzv", b"".join(records)), ("bzz", packed)):
            (folder / f"{testament}.{ending}").write_bytes(content)
    (folder / "verses-1769.json").write_text(json.dumps(english), "utf-8")


@writes("iwslt14")
def iwslt14(folder: Path) -> None:
    tags = "<url>http://a</url>\n<keywords>talks</keywords>\n<talkid>1</talkid>\n<title>{}</title>\n"
    for language, title, line in (
        ("de", "Das Wetter", "Es regnet &amp; {}"),
        ("en", "The weather", "It RAINS &amp; {}"),
    ):
        spoken = "".join(line.format(i) + "\n" for i in range(48)) + "a b c d e\n" * (language == "de")
        spoken += "a b\n" * (language == "en")
        (folder / f"train.tags.de-en.{language}").write_text(tags.format(title) + spoken)
        for part in ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012"):
            segments = "".join(f'<seg id="{i}"> {line.format(i)} </seg>\n' for i in range(2))
            text = f'<?xml version="1.0"?>\n<doc docid="1">\n<title>x</title>\n{segments}</doc>\n'
            (folder / f"IWSLT14.{part}.de-en.{language}.xml").write_text(text)


def photograph(path: Path, width: int, height: int, grey: int) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((height, width, 3), grey, np.uint8)
    Image.fromarray(pixels).save(path, "JPEG", quality=100)


@writes("imagenet")
def imagenet(folder: Path) -> None:
    for part, count in (("train", 4), ("val", 2)):
        for number, name in enumerate(("n01440764", "n01443537", "n01484850")):
            for image in range(count):
                photograph(folder / part / name / f"{name}_{image}.JPEG", 40 + image, 32, 50 * number)


@writes("miniimagenet")
def miniimagenet(folder: Path) -> None:
    for number, part in enumerate(("train", "val", "test")):
        names = [(f"n{number}{one}_{i}.jpg", f"n{number}{one}") for one in range(6) for i in range(2)]
        (folder / f"{part}.csv").write_text("filename,label\n" + "".join(f"{a},{b}\n" for a, b in names))
        for place, (name, _) in enumerate(names):
            photograph(folder / "images" / name, 20, 18, 80 * number + 6 * (place // 2))


def joint(place: int) -> str:
    return f"{place}.5 {place + 1} {place + 2} 250 180 1000 500 -0.1 0.01 -0.9 0.1 2"


@writes("ntu")
def ntu(folder: Path) -> None:
    (folder / "nturgb+d_skeletons").mkdir()
    for number, person in enumerate((1, 2, 4, 5, 8, 9, 3, 6, 7)):
        lines = ["3"]
        for frame in range(3):
            bodies = (1, 2, 0)[frame]
            lines.append(str(bodies))
            for body in range(bodies):
                lines += ["72057594037944738 0 1 1 1 1 0 0.01 -0.2 2", "25"]
                lines += [joint(100 * frame + 50 * body + one + number) for one in range(25)]
        name = f"S001C00{1 + number % 3}P{person:03}R001A0{number + 10}.skeleton"
        (folder / "nturgb+d_skeletons" / name).write_text("\n".join(lines) + "\n")


@writes("charades")
def charades(folder: Path) -> None:
    (folder / "features").mkdir()
    header = "id,subject,scene,quality,relevance,verified,script,objects,descriptions,actions,length"
    for part, count in (("train", 4), ("test", 2)):
        rows = [header]
        for number in range(count):
            name = f"{part[:2].upper()}{number}"
            actions = "c092 0.00 5.10;c156 5.00 12.00" if number else ""
            rows.append(f'{name},U,Kitchen,6,7,Yes,"A person, who cooks",pan,"cooks",{actions},10.00')
            np.save(folder / "features" / f"{name}.npy", random(4 + number, 3) / np.float32(99))
        (folder / f"Charades_v1_{part}.csv").write_text("\n".join(rows) + "\n")


@writes("ava")
def ava(folder: Path) -> None:
    (folder / "features").mkdir()
    for part, count in (("train", 3), ("val", 2)):
        rows, excluded = [], []
        for number in range(count):
            name = f"{part}-_{number}"
            rows += [f"{name},{second:04},0.1,0.2,0.9,1.0,{action},1" for second, action in ((902, 80), (904, 1))]
            excluded.append(f"{name},0903")
            np.save(folder / "features" / f"{name}.npy", random(5 + number, 3) / np.float32(99))
        (folder / f"ava_{part}_v2.2.csv").write_text("\n".join(rows) + "\n")
        (folder / f"ava_{part}_excluded_timestamps_v2.2.csv").write_text("\n".join(excluded) + "\n")


@writes("babyai")
def babyai(folder: Path) -> None:
    import blosc

    for name, count in (("agent", 4), ("agent_valid", 2)):
        episodes = []
        for number in range(count):
            steps = 2 + number
            images = random(steps, 7, 7, 3) % np.array([11, 6, 4], np.uint8)
            actions = [(number + t) % 7 for t in range(steps)]
            mission = "go to the red ball" if number % 2 else "go to a box"
            episodes.append((mission, blosc.pack_array(images), [t % 4 for t in range(steps)], actions))
        (folder / f"BabyAI-GoToObj-v0_{name}.pkl").write_bytes(pickle.dumps(episodes, 3))


@writes("mmlu")
def mmlu(folder: Path) -> None:
    for part, count in (("auxiliary_train", 4), ("dev", 5), ("val", 2), ("test", 3)):
        (folder / part).mkdir()
        for subject in ("law", "abstract_algebra"):
            rows = [f'"What, in\n{subject}, is {i}?",one,two,three,{i},{"ABCD"[i % 4]}' for i in range(count)]
            (folder / part / f"{subject}_{part}.csv").write_text("\n".join(rows) + "\n")


@writes("pile")
def pile(folder: Path) -> None:
    import zstandard

    (folder / "train").mkdir()
    for name in ("train/00", "train/01", "val", "test"):
        rows = [
            {"text": f"{name} é {i}\n" * 4, "meta": {"pile_set_name": ("Github", "ArXiv")[i % 2]}} for i in range(3)
        ]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{name}.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
